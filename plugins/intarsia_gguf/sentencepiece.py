"""Sentencepiece's BPE (`tokenizer.ggml.model` = llama): spaces are U+2581, pieces have scores, the rest is bytes.

Sentencepiece merges, of all neighbouring pieces whose join is a piece, the one with the best score. That is BPE with
every way of cutting a piece in two as a merge, ranked by the piece's score, as transformers' converter has it.
"""

from __future__ import annotations

from typing import Any

from intarsia_gguf.metadata import Metadata
from intarsia_gguf.vocabulary import SCORES, TOKENS, TokenType, Vocabulary

_SPACE = "\u2581"
_SPACE_PREFIX = "tokenizer.ggml.add_space_prefix"
_UNKNOWN = "tokenizer.ggml.unknown_token_id"
#: Phi-3's tokens that leave the white space behind them alone.
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# Several times what public models have; the work grows with length times number.
_MAX_PIECE = 512
_MAX_CHARACTERS = 1 << 23


def sentencepiece_definition(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of tokenizer.json; raise CheckpointError where the scores are missing."""
    add_prefix = metadata.flag(_SPACE_PREFIX, default=True)
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    # A prefix for every stretch between special tokens, as sentencepiece, llama.cpp and Llama 2's own file have it.
    normalizers = [{"type": "Prepend", "prepend": _SPACE}, to_space] if add_prefix else [to_space]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if add_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.tokens[
                metadata.integer(_UNKNOWN, low=0, high=len(vocabulary.tokens) - 1, default=0)
            ],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in vocabulary.types,
            "ignore_merges": False,
            "vocab": vocabulary.ids(),
            "merges": _merges(metadata, vocabulary),
        },
    }


def _added_tokens(metadata: Metadata, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Return the tokens that are matched whole. Phi-3's take the white space behind them along.

    The file does not say so; llama.cpp knows it by the model's name.
    """
    added = vocabulary.added_tokens()
    if metadata.text("general.architecture", default="") == "phi3":
        return [token | {"rstrip": token["content"] not in _PHI3_KEEPS_SPACE} for token in added]
    return added


def _merges(metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every way of cutting a normal piece into two others, the best score first."""
    scores = vocabulary.scores
    if scores is None:
        metadata.fail(SCORES, "is missing")
    ids = {
        token: index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (TokenType.NORMAL, TokenType.UNDEFINED)
    }
    if sum(map(len, ids)) > _MAX_CHARACTERS or max(map(len, ids), default=0) > _MAX_PIECE:
        metadata.fail(
            TOKENS, f"has a piece of more than {_MAX_PIECE} characters, or more than {_MAX_CHARACTERS} in all"
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                # Of one piece, transformers takes the cuts with the longer left part first.
                ranked.append((-scores[index], -len(left), -len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in ranked]
