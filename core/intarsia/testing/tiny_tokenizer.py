"""A tokenizer for suites: a token a byte, and one that ends an answer. Every text goes through it unchanged."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from intarsia.types import TokenizerSpec

__all__ = ["END", "END_ID", "NUM_TOKENS", "byte_tokenizer", "save_byte_tokenizer"]

#: The text and the id of the token that ends an answer, and how many tokens there are.
END, END_ID, NUM_TOKENS = "<|end|>", 256, 257


@cache
def _definition() -> str:
    """Return its tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return str(tokenizer.to_str())


def byte_tokenizer() -> TokenizerSpec:
    """Return it as data."""
    return TokenizerSpec(definition=_definition(), eos_ids=(END_ID,), special_tokens={"eos_token": END})


def save_byte_tokenizer(folder: Path) -> Path:
    """Save it beside a model as Hugging Face does; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_definition(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}), "utf-8")
    return folder
