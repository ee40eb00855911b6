"""Mixtral: llama with a sparse mixture of experts in every layer (Jiang et al. 2024)."""

from __future__ import annotations

from intarsia.families import (
    Family,
    Fields,
    Names,
    attention,
    decoder,
    head_dim,
    mixture,
    num_layers,
    one_window,
    read_rope,
)
from intarsia.types import DecoderSpec, LayerSpec

#: transformers' `MixtralConfig`, where it is not llama's.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts_per_tok": 2,
}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope = read_rope(fields, head_dim(fields), default_theta=1_000_000.0)
    layer = LayerSpec(
        attention=attention(fields, rope, window=one_window(fields)), mlp=mixture(fields, "intermediate_size")
    )
    return decoder("mixtral", fields, tensor_names, [layer] * num_layers(fields))


FAMILY = Family(
    _read,
    Names(
        router="block_sparse_moe.gate",
        expert="block_sparse_moe.experts.{}",
        expert_gate_up=("w1", "w3"),
        expert_down="w2",
    ),
)
