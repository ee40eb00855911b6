"""The llama family: RMS norm, rotary attention with grouped heads, a gated SiLU feed-forward.

Llama 1 to 3, SmolLM, SmolLM2, TinyLlama and whatever else says `model_type: llama`. Names and meaning of the config are
those of transformers' `LlamaConfig`.
"""

from __future__ import annotations

from intarsia.families import Family, Fields, attention, decoder, head_dim, mlp, num_layers, read_rope
from intarsia.types import DecoderSpec, LayerSpec


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields.must_be("sliding_window", None)
    count = num_layers(fields)
    if fields.has("layer_types"):
        fields.texts("layer_types", ("full_attention",), count)
    rope, bias = read_rope(fields, head_dim(fields)), fields.flag("attention_bias")
    layer = LayerSpec(
        attention=attention(fields, rope, qkv_bias=bias, out_bias=bias),
        mlp=mlp(fields, bias=fields.flag("mlp_bias")),
    )
    return decoder("llama", fields, tensor_names, [layer] * count)


FAMILY = Family(_read)
