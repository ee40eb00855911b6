"""The tokenizer that a GGUF file's metadata describes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from intarsia.errors import did_you_mean
from intarsia.types import TokenizerSpec
from intarsia_gguf.bytelevel import byte_level_definition, find_pre_tokenizer
from intarsia_gguf.metadata import Metadata
from intarsia_gguf.sentencepiece import sentencepiece_definition
from intarsia_gguf.vocabulary import MODEL, TOKENS, Vocabulary, read_vocabulary

_ADD_BOS = "tokenizer.ggml.add_bos_token"
_TEMPLATE = "tokenizer.chat_template"

#: `tokenizer.ggml.model` -> who builds its definition.
_MODELS: dict[str, Callable[[Metadata, Vocabulary], dict[str, Any]]] = {
    "gpt2": byte_level_definition,
    "llama": sentencepiece_definition,
}
#: Names that chat templates use -> names in the metadata.
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # llama.cpp's spelling
    "mask_token": "mask",
}
#: Ends of a text, of a turn and of a message.
_ENDS = ("eos", "eot", "eom")


def check_tokenizer(metadata: Metadata) -> None:
    """Check what is cheap to check of the tokenizer; raise CheckpointError where it is malformed."""
    if _has_tokenizer(metadata):
        vocabulary = read_vocabulary(metadata)
        for short in {*_SPECIAL.values(), *_ENDS}:
            _token_id(metadata, short, vocabulary)
        _add_bos(metadata)
        metadata.text(_TEMPLATE, default="")


def read_tokenizer(metadata: Metadata) -> TokenizerSpec | None:
    """Return the tokenizer, or None where the file has none.

    Raises:
        CheckpointError: the tokenizer is malformed, or of a kind that is not known.
    """
    if not _has_tokenizer(metadata):
        return None
    name = metadata.text(MODEL)
    build = _MODELS.get(name)
    if build is None:
        metadata.fail(MODEL, f"is {name[:100]!r}, which is not supported.{did_you_mean(name[:100], _MODELS)}")
    vocabulary = read_vocabulary(metadata)
    ids = {short: _token_id(metadata, short, vocabulary) for short in {*_SPECIAL.values(), *_ENDS}}
    ends = [ids[short] for short in _ENDS]
    special = {text: ids[short] for text, short in _SPECIAL.items()}
    return TokenizerSpec(
        definition=json.dumps(build(metadata, vocabulary), ensure_ascii=False),
        bos_id=ids["bos"],
        # In this order, each once.
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        add_bos=_add_bos(metadata) and ids["bos"] is not None,
        chat_template=metadata.text(_TEMPLATE) if _TEMPLATE in metadata else None,
        special_tokens={text: vocabulary.tokens[token] for text, token in special.items() if token is not None},
    )


def _has_tokenizer(metadata: Metadata) -> bool:
    """Files without one leave the keys out or state the model as `none` or `no_vocab`."""
    if MODEL not in metadata and TOKENS not in metadata:
        return False
    return metadata.text(MODEL) not in ("none", "no_vocab")


def _token_id(metadata: Metadata, short: str, vocabulary: Vocabulary) -> int | None:
    key = f"tokenizer.ggml.{short}_token_id"
    if key in metadata:
        return metadata.integer(key, low=0, high=len(vocabulary.tokens) - 1)
    # Where a file does not say, the ids are sentencepiece's, as llama.cpp takes them.
    defaults = {"unknown": 0, "bos": 1, "eos": 2} if metadata.text(MODEL) == "llama" else {}
    default = defaults.get(short)
    return default if default is not None and default < len(vocabulary.tokens) else None


def _add_bos(metadata: Metadata) -> bool:
    """Whether a prompt starts with BOS. Where the file does not say, its kind of tokenizer does, as in llama.cpp."""
    if _ADD_BOS not in metadata:
        name = metadata.text(MODEL)
        return name == "llama" or (name == "gpt2" and find_pre_tokenizer(metadata).add_bos)
    add_bos = metadata.flag(_ADD_BOS)
    if add_bos and "tokenizer.ggml.bos_token_id" not in metadata and metadata.text(MODEL) != "llama":
        metadata.fail(_ADD_BOS, "is true, but there is no 'tokenizer.ggml.bos_token_id'")
    return add_bos
