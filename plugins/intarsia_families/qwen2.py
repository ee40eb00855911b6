"""Qwen 2 and 2.5: llama with biases on queries, keys and values; late layers may have a window (Qwen Team 2024)."""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, late_windows, mlp, read_rope
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' Qwen2Config.
_DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope = read_rope(fields, head_dim(fields))
    layers = [
        LayerSpec(attention=attention(fields, rope, qkv_bias=True, window=window), mlp=mlp(fields))
        for window in late_windows(fields)
    ]
    return decoder("qwen2", fields, tensor_names, layers)


FAMILY = Family(_read)
