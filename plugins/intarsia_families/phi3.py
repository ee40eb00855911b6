"""Phi-3 to Phi-4: llama whose projections are stored fused; part of a head may rotate (Abdin et al. 2024)."""

from __future__ import annotations

from intarsia.families import (
    Family,
    Fields,
    Names,
    attention,
    decoder,
    head_dim,
    mlp,
    num_layers,
    one_window,
    read_rope,
)
from intarsia.types import DecoderSpec, LayerSpec

#: Of transformers' Phi3Config.
_DEFAULTS = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    rope = read_rope(fields, head_dim(fields), partial=1.0)
    if rope.kind not in ("default", "longrope"):  # transformers knows no others here, and takes yarn for longrope
        table = "rope_scaling" if fields.has("rope_scaling") else "rope_parameters"
        raise fields.wrong(table, "of rope kind 'longrope'")
    layer = LayerSpec(attention=attention(fields, rope, window=one_window(fields)), mlp=mlp(fields))
    return decoder("phi3", fields, tensor_names, [layer] * num_layers(fields))


FAMILY = Family(_read, Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)))
