"""Gemma 3, text alone: Gemma 2 with an RMS norm of each head's queries and keys (Gemma Team 2025).

Five layers in six have a window and turn by a base of their own.
"""

from __future__ import annotations

from typing import Any

from intarsia.families import Family, Fields, decoder, head_dim, max_len, read_rope
from intarsia.types import DecoderSpec
from intarsia_families.gemma2 import NAMES, gemma_layer, scales, windows_but_every

#: transformers' `Gemma3TextConfig`; published configs leave much of it out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


def read_text(family: str, fields: Fields, tensor_names: frozenset[str], **differs: Any) -> DecoderSpec:
    """Return the text model of a config, but for what `differs` (fields of DecoderSpec)."""
    fields = fields.over(_DEFAULTS)
    # transformers reads it and leaves it without effect.
    fields.must_be("attn_logit_softcapping", None)
    found = windows_but_every(fields.size("sliding_window_pattern", 6), fields)
    layers = {}
    for window in dict.fromkeys(found):
        kind, theta = ("sliding_attention", 10_000.0) if window else ("full_attention", 1_000_000.0)
        rope = read_rope(fields, head_dim(fields), kind, default_theta=theta)
        layers[window] = gemma_layer(fields, rope, window, qk_norm="head")
    facts = scales(fields) | {"max_len": max_len(fields, None)} | differs
    return decoder(family, fields, tensor_names, [layers[window] for window in found], **facts)


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    return read_text("gemma3_text", fields, tensor_names)


FAMILY = Family(_read, NAMES)
