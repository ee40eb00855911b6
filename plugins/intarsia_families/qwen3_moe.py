"""Qwen 3 with a sparse mixture of experts in most layers (Qwen Team 2025)."""

from __future__ import annotations

from intarsia.families import (
    MAX_LAYERS,
    MAX_LEN,
    Family,
    Fields,
    attention,
    decoder,
    head_dim,
    mixture,
    mlp,
    num_layers,
    read_rope,
)
from intarsia.types import DecoderSpec, LayerSpec

#: transformers' `Qwen3MoeConfig`, where it is not llama's.
_DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def _dense_layers(fields: Fields, count: int) -> frozenset[int]:
    """Return the layers that have one feed-forward block in place of a mixture."""
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list | tuple) or not all(type(index) is int for index in listed):
        raise fields.wrong("mlp_only_layers", "a list of layers' numbers")
    listed, step = set(listed), fields.size("decoder_sparse_step", high=MAX_LAYERS)
    return frozenset(index for index in range(count) if index in listed or (index + 1) % step)


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    windowed = fields.flag("use_sliding_window") and fields.has("sliding_window")
    heads = attention(
        fields,
        rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        window=fields.size("sliding_window", high=MAX_LEN) if windowed else None,
    )
    count = num_layers(fields)
    dense = _dense_layers(fields, count)
    layers = dict.fromkeys(dense, LayerSpec(heads, mlp(fields))) if dense else {}
    if len(dense) < count:
        experts = mixture(fields, "moe_intermediate_size", normalized=fields.flag("norm_topk_prob"))
        layers |= dict.fromkeys(frozenset(range(count)) - dense, LayerSpec(heads, experts))
    return decoder("qwen3_moe", fields, tensor_names, [layers[index] for index in range(count)])


FAMILY = Family(_read)
