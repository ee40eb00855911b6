"""Qwen 3: llama with an RMS norm of each head's queries and keys; late layers may have a window (Qwen Team 2025)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, late_windows, mlp, read_rope
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' Qwen3Config.
_DEFAULTS = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    layers = [
        LayerSpec(
            attention=attention(fields, rope, qkv_bias=bias, out_bias=bias, qk_norm="head", window=window),
            mlp=mlp(fields),
        )
        for window in late_windows(fields)
    ]
    return decoder("qwen3", fields, tensor_names, layers)


FAMILY = Family(_read)
