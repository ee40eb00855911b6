"""Gemma 2: norms on both sides of each block, soft caps, every other layer with a window (Gemma Team 2024)."""

from __future__ import annotations

from typing import Any, Literal

from intarsia.families import (
    ACTIVATIONS,
    Family,
    Fields,
    Names,
    attention,
    decoder,
    head_dim,
    num_layers,
    read_rope,
    windows,
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


def windows_but_every(period: int, fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer: as `layer_types` says, or all but every `period`-th have one."""
    return windows(fields, [bool((index + 1) % period) for index in range(num_layers(fields))])


def _soft_cap(fields: Fields, name: str) -> float | None:
    """Return a soft cap; null is none."""
    return fields.number(name) if fields.has(name) else None


def gemma_layer(
    fields: Fields, rope: RopeSpec, window: int | None, *, qk_norm: Literal["head"] | None = None
) -> LayerSpec:
    """Return a layer as Gemma 2 and 3 have it."""
    fields.must_be("use_bidirectional_attention", False)
    bias = fields.flag("attention_bias")
    return LayerSpec(
        attention=attention(
            fields,
            rope,
            scale=fields.number("query_pre_attn_scalar") ** -0.5,
            window=window,
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
    rope, found = read_rope(fields, head_dim(fields)), windows_but_every(2, fields)
    layers = {window: gemma_layer(fields, rope, window) for window in dict.fromkeys(found)}
    return decoder("gemma2", fields, tensor_names, [layers[window] for window in found], **scales(fields))


FAMILY = Family(_read, NAMES)
