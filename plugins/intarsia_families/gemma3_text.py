"""Gemma 3, text alone: Gemma 2 with an RMS norm of each head's queries and keys (Gemma Team 2025).

Five layers in six have a window and turn by a base of their own.
"""

from __future__ import annotations

from typing import Any

from intarsia.families import Family, Fields, decoder, head_dim, read_rope
from intarsia.types import DecoderSpec
from intarsia_families.gemma2 import NAMES, gemma_layer, layer_kinds, scales

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
_THETAS = {"sliding_attention": 10_000.0, "full_attention": 1_000_000.0}


def read_text(family: str, fields: Fields, tensor_names: frozenset[str], **differs: Any) -> DecoderSpec:
    """Return the text model of a config, but for what `differs` (fields of DecoderSpec)."""
    fields = fields.over(_DEFAULTS)
    # transformers reads it and leaves it without effect.
    fields.must_be("attn_logit_softcapping", None)
    kinds = layer_kinds(fields, fields.size("sliding_window_pattern", 6))
    layers = {}
    for kind in sorted(set(kinds)):
        rope = read_rope(fields, head_dim(fields), kind, default_theta=_THETAS[kind])
        layers[kind] = gemma_layer(fields, kind, rope, qk_norm="head")
    return decoder(family, fields, tensor_names, [layers[kind] for kind in kinds], **scales(fields), **differs)


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    return read_text("gemma3_text", fields, tensor_names)


FAMILY = Family(_read, NAMES)
