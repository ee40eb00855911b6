"""What a model's spec demands of its weights, written out from the table in `intarsia.models.weights`.

Shape legend: E embed, H heads, K kv heads, D head dim, F ffn, V vocab, X experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from intarsia.types import DecoderSpec, LayerSpec, MoeSpec, RopeSpec

__all__ = ["check_spec", "needed"]

#: Numbers that a model computes with are between these; beyond, float32 has no room for products.
_LOW, _HIGH = 1e-30, 1e30
_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def needed(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that a model has, by canonical name."""
    embed = (spec.vocab_size, spec.embed_dim)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": embed}
    if spec.num_positions:
        shapes["positions.weight"] = (spec.num_positions, spec.embed_dim)
    for index, layer in enumerate(spec.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer(spec, layer)}
    shapes |= dict(_norm(spec, "norm"))
    if not spec.tied:
        shapes["head.weight"] = embed
    if spec.head_bias:
        shapes["head.bias"] = (spec.vocab_size,)
    return shapes


def _norm(spec: DecoderSpec, name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (spec.embed_dim,)
    if spec.norm.bias:
        yield f"{name}.bias", (spec.embed_dim,)


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _layer(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    attention, wide = layer.attention, layer.attention.num_heads * layer.attention.head_dim
    narrow = attention.num_kv_heads * attention.head_dim
    if layer.norms != "post":
        yield from _norm(spec, "attention_norm")
    yield from _linear("qkv", wide + 2 * narrow, spec.embed_dim, bias=attention.qkv_bias)
    if attention.qk_norm is not None:
        whole = attention.qk_norm == "all"
        yield "q_norm.weight", (wide if whole else attention.head_dim,)
        yield "k_norm.weight", (narrow if whole else attention.head_dim,)
    yield from _linear("out", spec.embed_dim, wide, bias=attention.out_bias)
    if layer.norms != "pre":
        yield from _norm(spec, "attention_post_norm")
    if layer.norms != "post" and not layer.parallel:
        yield from _norm(spec, "mlp_norm")
    yield from _feed_forward(spec, layer)
    if layer.norms != "pre":
        yield from _norm(spec, "mlp_post_norm")


def _feed_forward(spec: DecoderSpec, layer: LayerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    mlp = layer.mlp
    if isinstance(mlp, MoeSpec):
        yield "router.weight", (mlp.num_experts, spec.embed_dim)
        for expert in range(mlp.num_experts):
            yield f"experts.{expert}.gate_up.weight", (2 * mlp.ffn_dim, spec.embed_dim)
            yield f"experts.{expert}.down.weight", (spec.embed_dim, mlp.ffn_dim)
        return
    name, times = ("gate_up", 2) if mlp.gated else ("up", 1)
    yield from _linear(name, times * mlp.ffn_dim, spec.embed_dim, bias=mlp.bias)
    yield from _linear("down", spec.embed_dim, mlp.ffn_dim, bias=mlp.bias)


# --- a spec that can be run -------------------------------------------------------------------------------------------


def check_spec(spec: DecoderSpec) -> None:
    """Raise AssertionError where a spec holds what no model can have."""
    for name in ("vocab_size", "embed_dim", "max_len"):
        _size(name, getattr(spec, name))
    assert spec.layers, "a model without layers"
    assert type(spec.tied) is bool and type(spec.head_bias) is bool, f"tied is {spec.tied!r}"
    assert spec.norm.kind in ("rms", "layer"), f"norm.kind is {spec.norm.kind!r}"
    positions = spec.num_positions
    assert type(positions) is int and positions >= 0, f"num_positions is {positions!r}"
    assert not positions or spec.max_len <= positions, f"max_len is {spec.max_len}, and there are {positions} positions"
    _number("norm.eps", spec.norm.eps)
    _number("embedding_scale", spec.embedding_scale)
    _number("logit_scale", spec.logit_scale)
    _cap("logit_soft_cap", spec.logit_soft_cap)
    for layer in dict.fromkeys(spec.layers):
        _check_layer(layer)


def _check_layer(layer: LayerSpec) -> None:
    attention, mlp = layer.attention, layer.mlp
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        _size(name, getattr(attention, name))
    assert not attention.num_heads % attention.num_kv_heads, (
        f"{attention.num_heads} heads do not share {attention.num_kv_heads} kv heads evenly"
    )
    _number("attention.scale", attention.scale)
    _number("residual_scale", layer.residual_scale)
    _cap("soft_cap", attention.soft_cap)
    if attention.window is not None:
        _size("window", attention.window)
    assert attention.qk_norm in (None, "head", "all"), f"qk_norm is {attention.qk_norm!r}"
    assert layer.norms in ("pre", "post", "both"), f"norms is {layer.norms!r}"
    _size("ffn_dim", mlp.ffn_dim)
    if isinstance(mlp, MoeSpec):
        _size("num_experts", mlp.num_experts)
        _size("top_k", mlp.top_k)
        assert mlp.top_k <= mlp.num_experts, f"each token goes to {mlp.top_k} of {mlp.num_experts} experts"
    if attention.rope is not None:
        _check_rope(attention.rope, attention.head_dim)


def _check_rope(rope: RopeSpec, head_dim: int) -> None:
    assert rope.kind in _ROPES, f"rope.kind is {rope.kind!r}"
    _size("rope.dim", rope.dim)
    assert rope.dim <= head_dim and not rope.dim % 2, f"{rope.dim} of a head's {head_dim} dimensions are rotated"
    for name in ("base", "factor", "attention_factor"):
        _number(f"rope.{name}", getattr(rope, name))


def _size(name: str, value: object) -> None:
    assert type(value) is int and value > 0, f"{name} is {value!r}, not a whole number from 1"


def _number(name: str, value: object) -> None:
    assert isinstance(value, int | float) and not isinstance(value, bool), f"{name} is {value!r}, not a number"
    assert math.isfinite(value) and _LOW <= value <= _HIGH, f"{name} is {value!r}: float32 cannot work with it"


def _cap(name: str, value: float | None) -> None:
    if value is not None:
        _number(name, value)
