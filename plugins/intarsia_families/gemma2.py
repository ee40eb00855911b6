"""Gemma 2: norms on both sides of each block, soft caps, every other layer with a window (Gemma Team 2024)."""

from __future__ import annotations

from typing import Any, Literal

from intarsia.families import (
    ACTIVATIONS,
    MAX_LEN,
    Family,
    Fields,
    Names,
    attention,
    decoder,
    head_dim,
    num_layers,
    read_rope,
)
from intarsia.types import DecoderSpec, LayerSpec, MlpSpec, RopeSpec

#: What a Gemma stores: norms around 0, multiplied in fp32.
NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
    norm_offset=1.0,
    norm_float32=True,
)
_WINDOW, _FULL = "sliding_attention", "full_attention"
#: transformers' `Gemma2Config`. A soft cap that is null is none; one that is absent is this.
_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def layer_kinds(fields: Fields, period: int) -> tuple[str, ...]:
    """Return each layer's kind: as listed, or with a window but for every `period`-th."""
    count = num_layers(fields)
    if fields.has("layer_types"):
        return fields.texts("layer_types", (_WINDOW, _FULL), count)
    return tuple(_WINDOW if (index + 1) % period else _FULL for index in range(count))


def _soft_cap(fields: Fields, name: str) -> float | None:
    """Return a soft cap; null is none."""
    return fields.number(name) if fields.has(name) else None


def gemma_layer(fields: Fields, kind: str, rope: RopeSpec, *, qk_norm: Literal["head"] | None = None) -> LayerSpec:
    """Return a layer of one kind, as Gemma 2 and 3 have it."""
    fields.must_be("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias")
    return LayerSpec(
        attention=attention(
            fields,
            rope,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            window=fields.size("sliding_window", high=MAX_LEN) if kind == _WINDOW else None,
            soft_cap=_soft_cap(fields, "attn_logit_softcapping"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm,
        ),
        mlp=MlpSpec(fields.size("intermediate_size"), fields.choice("hidden_activation", ACTIVATIONS)),
        norms="both",
    )


def scales(fields: Fields) -> dict[str, Any]:
    """Return what Gemma 2 and 3 do at both ends, as fields of DecoderSpec: embeddings scaled, logits capped."""
    return {
        "embedding_scale": fields.size("hidden_size") ** 0.5,
        "logit_soft_cap": _soft_cap(fields, "final_logit_softcapping"),
    }


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields = fields.over(_DEFAULTS)
    kinds = layer_kinds(fields, 2)
    rope = read_rope(fields, head_dim(fields))
    layers = {kind: gemma_layer(fields, kind, rope) for kind in sorted(set(kinds))}
    return decoder("gemma2", fields, tensor_names, [layers[kind] for kind in kinds], **scales(fields))


FAMILY = Family(_read, NAMES)
