"""Phi 1 and 2: attention and feed-forward side by side, part of each head rotated, biases everywhere (Li 2023)."""

from __future__ import annotations

from intarsia.families import ACTIVATIONS, Family, Fields, Names, attention, decoder, head_dim, num_layers, read_rope
from intarsia.types import DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields.must_be("qk_layernorm", False)
    rope = read_rope(fields, head_dim(fields), partial=0.5)
    layer = LayerSpec(
        attention=attention(fields, rope, qkv_bias=True, out_bias=True),
        mlp=MlpSpec(
            fields.size("intermediate_size"),
            fields.choice("hidden_act", ACTIVATIONS, "gelu_new"),
            bias=True,
            gated=False,
        ),
        parallel=True,
    )
    norm = NormSpec("layer", fields.number("layer_norm_eps", 1e-5), bias=True)
    return decoder("phi", fields, tensor_names, [layer] * num_layers(fields), norm=norm, head_bias=True)


FAMILY = Family(
    _read,
    Names(norm="model.final_layernorm", out="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
)
