"""A model's weights through its quantizers, one layer at a time, under the names that its files give them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from attrs import evolve, frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import Parts, Quantizer
from intarsia.types import EMBED, HEAD, POSITIONS, AttentionSpec, TensorSource, Weight, dense
from intarsia_quantized.folding import Values, fold, shared

#: What Hugging Face calls a head that has no tensor in the model's own files.
_HEAD_NAME = "lm_head.weight"


@frozen(eq=False)
class Named:
    """A tensor under Hugging Face's name, as floats or in a weight format.

    Attributes:
        name: with `.weight` or `.bias`.
        linear: it is the matrix of a linear layer, and not one that is looked up.
    """

    name: str
    value: Weight | torch.Tensor
    linear: bool


def quantized(parts: Parts, plain: Parts | None = None) -> Iterator[Named]:
    """Give every tensor of the model. At most one layer is in memory.

    Weights are read in float32, whatever the model runs in, so that they are rounded once. Input scales of `out` that
    differ between heads which share values have no place in a folder: `plain` rounds that weight anew, by their mean.

    Args:
        parts: the model and its quantizers.
        plain: the same with quantizers that give no input scales.

    Raises:
        CheckpointError: a weight cannot be read, quantized, or be without its input scales; names it.
    """
    sources = dict(parts.weight_map.tensors)
    tied = HEAD not in sources
    if tied and _taking(parts.quantizers, HEAD, sources[EMBED].shape):
        sources[HEAD] = sources[EMBED]
    for prefix, names in groupby(sources, _prefix):
        values: Values = {name: _value(parts, name, sources[name]) for name in names}
        layer = parts.spec.layers[int(prefix.split(".")[1])] if prefix else None
        if layer is not None and plain is not None:
            _share(values, f"{prefix}out.weight", layer.attention, plain, sources)
        fold(values, prefix, layer, {name: sources[name].offset for name in values})
        for name, value in values.items():
            yield from _named(name, value, sources[name], apart=tied and name == HEAD)


def _share(
    values: Values, name: str, attention: AttentionSpec, plain: Parts, sources: Mapping[str, TensorSource]
) -> None:
    """Round `out` anew where its scales differ between heads that share values."""
    weight = values[name]
    assert isinstance(weight, Weight)
    scale = weight.tensors.get("input_scale")
    if scale is None or torch.equal(mean := shared(scale.float(), attention), scale.float()):
        return
    matrix = _read(plain, sources[name]) / mean
    again = dense(matrix)
    for quantizer in _taking(plain.quantizers, name, weight.shape):
        again = quantizer.quantize(name, again)
    values[name] = evolve(again, tensors={**again.tensors, "input_scale": mean})


def _prefix(name: str) -> str:
    """Return `layers.3.` of a layer's tensor, else nothing."""
    return ".".join(name.split(".")[:2]) + "." if name.startswith("layers.") else ""


def _taking(quantizers: tuple[Quantizer, ...], name: str, shape: tuple[int, ...]) -> list[Quantizer]:
    return [quantizer for quantizer in quantizers if quantizer.accepts(name, shape)]


def _read(parts: Parts, source: TensorSource) -> torch.Tensor:
    whole = torch.empty((sum(shape[0] for shape in source.shapes), *source.shapes[0][1:]))
    start = 0
    for stored, shape in zip(source.names, source.shapes, strict=True):
        parts.checkpoint.tensors[stored].read(whole.narrow(0, start, shape[0]))
        start += shape[0]
    return whole


def _value(parts: Parts, name: str, source: TensorSource) -> Weight | torch.Tensor:
    whole = _read(parts, source)
    if whole.dim() != 2 or name == POSITIONS:
        return whole
    weight = dense(whole)
    taking = _taking(parts.quantizers, name, source.shape)
    if taking and (name == EMBED or source.transposed):
        why = "it is looked up by rows" if name == EMBED else "the model's files store it the other way round"
        raise CheckpointError(f"{name}: compressed-tensors has no format for it, since {why}; leave it as it is")
    for quantizer in taking:
        weight = quantizer.quantize(name, weight)
    return weight


def _named(name: str, value: Weight | torch.Tensor, source: TensorSource, *, apart: bool) -> Iterator[Named]:
    """Give the tensors that a canonical one is made of."""
    names = (_HEAD_NAME,) if apart else source.names
    linear = isinstance(value, Weight) and name != EMBED
    start = 0
    for stored, shape in zip(names, source.shapes, strict=True):
        rows = slice(start, start + shape[0])
        part = value.rows(rows) if isinstance(value, Weight) else value[rows]
        if isinstance(part, Weight) and part.format.name == "dense":
            part = part.dequantize()
        yield Named(stored, part, linear)
        start += shape[0]
