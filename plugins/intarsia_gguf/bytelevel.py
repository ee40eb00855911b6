"""GPT-2's kind of tokenizer: bytes spelled as characters, merged pair by pair (`tokenizer.ggml.model` = gpt2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.errors import did_you_mean
from intarsia_gguf.metadata import Metadata
from intarsia_gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer, byte_level
from intarsia_gguf.vocabulary import Vocabulary

_MERGES = "tokenizer.ggml.merges"
_PRE = "tokenizer.ggml.pre"
_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"


def find_pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    """Return how the file's tokenizer cuts words; raise CheckpointError for a way that is not known."""
    name = metadata.text(_PRE, default="default")
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        metadata.fail(_PRE, f"is {name[:100]!r}, which is not supported.{did_you_mean(name[:100], PRE_TOKENIZERS)}")
    return found


def byte_level_definition(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json; raise CheckpointError where a merge is malformed."""
    pre = find_pre_tokenizer(metadata)
    vocab = vocabulary.ids()
    add_prefix_space = metadata.flag(_SPACE_PREFIX, default=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": pre.normalizer(),
        "pre_tokenizer": pre.pre_tokenizer(add_prefix_space),
        "post_processor": None,
        "decoder": byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            # Without one, a byte that has no token is left out.
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _read_merges(metadata, vocab),
        },
    }


def _read_merges(metadata: Metadata, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(metadata.texts(_MERGES)):
        # The space that separates; a first character that is a space belongs to the left part.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not right:
            metadata.fail(_MERGES, f"has item {index}, {merge[:100]!r}, which is not two texts with a space between")
        if left not in vocab or right not in vocab or left + right not in vocab:
            metadata.fail(_MERGES, f"has item {index}, {merge[:100]!r}, with a text that is no token")
        merges.append((left, right))
    return merges
