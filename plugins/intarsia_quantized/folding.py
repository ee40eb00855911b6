"""Input scales, folded into what stands before a matrix: its product with scaled activations stays the same.

`input_scale` (C,) multiplies the activations (see `intarsia.quantizing.integers`), and formats of other projects have
no such tensor. It goes where the activations come from:

| matrix | into | where |
| --- | --- | --- |
| `qkv`, `gate_up`, `up`, `head` | the norm that it reads from | that norm feeds nothing else |
| `down` | the rows of `up` | the feed-forward is gated: `up` is a factor of what `down` reads |
| `out` | the rows of the values | heads that share values have equal scales; see `shared` |

Shape legend: N out features, C in features, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from attrs import evolve

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import AttentionSpec, LayerSpec, MoeSpec, Weight, dense

Values = dict[str, Weight | torch.Tensor]


def fold(values: Values, prefix: str, layer: LayerSpec | None, offsets: dict[str, float]) -> None:
    """Fold the input scales of one layer's weights, or of the head's, in place.

    Args:
        values: canonical name -> weight or vector.
        prefix: `layers.3.`, or nothing for the head.
        layer: None for the head.
        offsets: what is added to the numbers of a vector that is stored less it.

    Raises:
        CheckpointError: a scale has nowhere to go; names the weight.
    """
    for name in list(values):
        weight = values[name]
        if not isinstance(weight, Weight) or "input_scale" not in weight.tensors:
            continue
        scale = weight.tensors["input_scale"].float()
        bare = {key: tensor for key, tensor in weight.tensors.items() if key != "input_scale"}
        values[name] = evolve(weight, tensors=bare)
        kind = name.removeprefix(prefix).removesuffix(".weight")
        if layer is None:
            _into_norm(values, "norm", scale, offsets)
        elif isinstance(layer.mlp, MoeSpec) and kind not in ("qkv", "out"):
            raise _stuck(name, "its experts and their router read the same activations")
        elif kind == "out":
            _into_values(values, prefix, layer.attention, scale)
        elif kind == "down":
            if not layer.mlp.gated:  # type: ignore[union-attr]
                raise _stuck(name, "an activation function stands before it")
            _scale_rows(values, f"{prefix}gate_up", len(scale), scale)
        elif layer.parallel or layer.norms == "post":
            raise _stuck(name, "no norm stands before it alone")
        else:
            _into_norm(values, f"{prefix}{'attention_norm' if kind == 'qkv' else 'mlp_norm'}", scale, offsets)


def shared(scale: torch.Tensor, attention: AttentionSpec) -> torch.Tensor:
    """Return scales (H D,) of `out` made equal where heads share values: their geometric mean."""
    by_head = scale.view(attention.num_kv_heads, -1, attention.head_dim)
    return by_head.log().mean(1, keepdim=True).exp().expand_as(by_head).flatten()


def _stuck(name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: its input scales cannot be folded into what stands before it, since {why}; a folder has no place for "
        f"them. Leave it out: -o 'quantizer.exclude=[\"{name}\"]'"
    )


def _into_norm(values: Values, norm: str, scale: torch.Tensor, offsets: dict[str, float]) -> None:
    weight, bias = values[f"{norm}.weight"], values.get(f"{norm}.bias")
    assert isinstance(weight, torch.Tensor)
    offset = offsets.get(f"{norm}.weight", 0.0)
    values[f"{norm}.weight"] = (weight + offset) * scale - offset
    if isinstance(bias, torch.Tensor):
        values[f"{norm}.bias"] = bias * scale


def _into_values(values: Values, prefix: str, attention: AttentionSpec, scale: torch.Tensor) -> None:
    by_head = scale.view(attention.num_kv_heads, -1, attention.head_dim)
    if not torch.equal(by_head, by_head[:, :1].expand_as(by_head)):
        raise _stuck(f"{prefix}out.weight", "heads that share values have scales of their own")
    rows = by_head[:, 0].flatten()
    first = (attention.num_heads + attention.num_kv_heads) * attention.head_dim
    _scale_rows(values, f"{prefix}qkv", first, rows)


def _scale_rows(values: Values, name: str, first: int, factors: torch.Tensor) -> None:
    """Multiply the rows of a linear from `first` on, and their biases."""
    rows = slice(first, first + len(factors))
    weight, bias = values[f"{name}.weight"], values.get(f"{name}.bias")
    assert isinstance(weight, Weight)
    if isinstance(weight.format, IntegerFormat):
        keys = [key for key in ("scale", "min") if key in weight.tensors]
        scaled = {key: _scaled(weight.tensors[key], rows, factors) for key in keys}
        values[f"{name}.weight"] = evolve(weight, tensors={**weight.tensors, **scaled})
    else:
        matrix = weight.dequantize().clone()
        matrix[rows] *= factors[:, None]
        values[f"{name}.weight"] = dense(matrix)
    if isinstance(bias, torch.Tensor):
        bias = bias.clone()
        bias[rows] *= factors
        values[f"{name}.bias"] = bias


def _scaled(scales: torch.Tensor, rows: slice, factors: torch.Tensor) -> torch.Tensor:
    """Return scales a row or a group with some rows multiplied, in their dtype where that loses nothing."""
    wide = scales.float().clone()
    wide[rows] *= factors if wide.dim() == 1 else factors[:, None]
    narrow = wide.to(scales.dtype)
    return narrow if torch.equal(narrow.float(), wide) else wide
