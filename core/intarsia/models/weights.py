"""Loading: checkpoint tensors -> the model's weights, by canonical name.

| name | shape | where |
| --- | --- | --- |
| `embed.weight` | (V, E) | |
| `positions.weight` | (L, E) | positions are learned |
| `layers.{i}.attention_norm` | (E,) | norms are `pre` or `both` |
| `layers.{i}.qkv` | ((H + 2K) D, E): queries, keys, values | |
| `layers.{i}.q_norm`, `.k_norm` | (D,), or (H D,) and (K D,) | `qk_norm` is `head`, or `all` |
| `layers.{i}.out` | (E, H D) | |
| `layers.{i}.attention_post_norm` | (E,) | norms are `post` or `both` |
| `layers.{i}.mlp_norm` | (E,) | as attention's, where the layer is not parallel |
| `layers.{i}.gate_up` | (2F, E): gate, up | the feed-forward is gated |
| `layers.{i}.up` | (F, E) | it is not |
| `layers.{i}.down` | (E, F) | |
| `layers.{i}.router` | (X, E) | a mixture of X experts, which has, in place of the three above: |
| `layers.{i}.experts.{x}.gate_up`, `.down` | (2F, E), (E, F) | |
| `layers.{i}.mlp_post_norm` | (E,) | as attention's |
| `norm` | (E,) | |
| `head.weight` | (V, E) | it is not tied to the embedding |

Each name but the embeddings' has a `.weight`, and a `.bias` where the spec says so. Matrices are `Weight`s, vectors are
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from attrs import evolve

from intarsia.errors import CheckpointError
from intarsia.models.parts import cut, read_part
from intarsia.ops import Ops
from intarsia.protocols import Progress, Quantizer
from intarsia.quantizing.integers import IntegerFormat, common, join
from intarsia.quantizing.options import stays_dense
from intarsia.types import (
    EMBED,
    HEAD,
    POSITIONS,
    Checkpoint,
    StorableFormat,
    StoredWeight,
    TensorSource,
    Weight,
    WeightMap,
    dense,
)

Weights: TypeAlias = Mapping[str, Weight | torch.Tensor]

_SHOWN = 5


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_tensors(checkpoint: Checkpoint, weight_map: WeightMap) -> None:
    """Check that the files hold exactly the model's tensors, in its shapes. Reads no weights.

    Raises:
        CheckpointError: tensors are missing, unread or of another shape; names them.
    """
    wanted = {
        name: shape
        for source in weight_map.tensors.values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    if missing := wanted.keys() - checkpoint.tensors.keys():
        raise CheckpointError(f"the checkpoint lacks tensors that the model needs: {_listed(missing)}")
    unread = {name for name in checkpoint.tensors.keys() - wanted.keys() if not weight_map.ignores(name)}
    if unread:
        raise CheckpointError(f"the checkpoint holds tensors that the model would not read: {_listed(unread)}")
    for name, shape in wanted.items():
        if (stored := checkpoint.tensors[name].shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {stored}; the config says {shape}")


def keep_stored(weight_map: WeightMap, checkpoint: Checkpoint, quantizers: Sequence[Quantizer]) -> WeightMap:
    """Return the map with those sources marked that can stay in the format of their files.

    A source that a quantizer takes is read as floats. So are routers and positions, which quantizers leave alone too,
    one whose tensors have no format in common, and one that the model has otherwise than the files: transposed, or with
    an offset.
    """
    tensors = {
        name: source
        if stays_dense(name) or any(quantizer.accepts(name, source.shape) for quantizer in quantizers)
        else evolve(source, kept=_stored_format(checkpoint, source))
        for name, source in weight_map.tensors.items()
    }
    return evolve(weight_map, tensors=tensors)


def _stored_format(checkpoint: Checkpoint, source: TensorSource) -> StorableFormat | None:
    stored = [checkpoint.tensors[name] for name in source.names]
    if source.transposed or source.offset or source.float32:
        return None
    formats = [tensor.weight_format for tensor in stored if isinstance(tensor, StoredWeight)]
    if len(formats) < len(stored):
        return None
    if len(formats) == 1:
        return formats[0]
    integers = [weight_format for weight_format in formats if isinstance(weight_format, IntegerFormat)]
    return common(integers) if len(integers) == len(formats) else None


def num_parameters(weight_map: WeightMap) -> int:
    """Return how many numbers the model's tensors hold."""
    return sum(torch.Size(source.shape).numel() for source in weight_map.tensors.values())


def load_weights(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantizers: Sequence[Quantizer],
    ops: Ops,
    progress: Progress,
) -> Weights:
    """Read every tensor into its run dtype; at once quantize it where a quantizer takes it, and pack it for its kernel.

    Where a rank holds a part, what is quantized is quantized whole and then cut: so that its numbers are those of one
    device, whatever a quantizer looks at beyond a row and a group. Other tensors are read in their parts alone.

    A tied head has a weight of its own only where it is packed, or quantized apart. Anonymous memory grows by the
    weights and one tensor: tensors are read one by one, straight to their final place.

    Raises:
        CheckpointError: a tensor cannot be read or quantized; names it.
    """
    weights: dict[str, Weight | torch.Tensor] = {}
    total = num_parameters(weight_map)
    done = 0
    for name, source in weight_map.tensors.items():
        if source.kept is not None:
            kept = _to(cut(_read_kept(checkpoint, source), source.part), device)
            weights[name] = kept if name == EMBED else ops.pack(kept)
        elif len(source.whole) == 2:
            weights[name] = _matrix(name, source, partial(_read_on, checkpoint, dtype, device), quantizers, ops)
        else:
            weights[name] = _read(checkpoint, source, dtype).to(device)
        done += torch.Size(source.shape).numel()
        progress("loading weights", done, total)
    embed = weights.get(EMBED)
    if isinstance(embed, Weight) and HEAD not in weights and weight_map.has_head:
        source = weight_map.tensors[EMBED]
        head = embed
        if apart := tied_head_quantizers(quantizers, source.whole):
            # A copy, since a quantizer may change the numbers where they are.
            whole = embed if source.part is None else _read_whole(checkpoint, source, dtype, device)
            head = cut(_quantized(HEAD, dense(whole.dequantize().clone()), apart), source.part)
        head = ops.pack(head)
        if head is not embed:
            weights[HEAD] = head
    return weights


def tied_head_quantizers(quantizers: Sequence[Quantizer], shape: tuple[int, ...]) -> list[Quantizer]:
    """Return those that take a head which is tied to an embedding that they leave alone."""
    return [q for q in quantizers if q.accepts(HEAD, shape) and not q.accepts(EMBED, shape)]


def _read(checkpoint: Checkpoint, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    dtype = torch.float32 if source.float32 else dtype
    if source.part is not None:
        return read_part(checkpoint, source, dtype)
    if source.transposed:
        stored = torch.empty(source.shapes[0], dtype=dtype)
        checkpoint.tensors[source.names[0]].read(stored)
        return stored.t().contiguous()
    whole = torch.empty(source.shape, dtype=dtype)
    start = 0
    for name, shape in zip(source.names, source.shapes, strict=True):
        checkpoint.tensors[name].read(whole.narrow(0, start, shape[0]))
        start += shape[0]
    return whole.add_(source.offset) if source.offset else whole


def _read_kept(checkpoint: Checkpoint, source: TensorSource) -> Weight:
    parts = []
    for name in source.names:
        stored = checkpoint.tensors[name]
        assert isinstance(stored, StoredWeight)
        parts.append(stored.read_weight())
    weight = parts[0] if len(parts) == 1 else join(parts)
    assert weight.format == source.kept, f"{source.names}: {weight.format.name}, not {source.kept}"
    return weight


def _to(weight: Weight, device: torch.device) -> Weight:
    return evolve(weight, tensors={key: tensor.to(device) for key, tensor in weight.tensors.items()})


def _read_on(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, source: TensorSource) -> Weight:
    return dense(_read(checkpoint, source, dtype).to(device))


def _read_whole(checkpoint: Checkpoint, source: TensorSource, dtype: torch.dtype, device: torch.device) -> Weight:
    """Return a source without regard to its part, as it is before any quantizer."""
    if source.kept is not None:
        return _to(_read_kept(checkpoint, source), device)
    return _read_on(checkpoint, dtype, device, evolve(source, part=None))


def _matrix(
    name: str,
    source: TensorSource,
    read: Callable[[TensorSource], Weight],
    quantizers: Sequence[Quantizer],
    ops: Ops,
) -> Weight:
    if name == POSITIONS:
        return read(source)
    takers = [quantizer for quantizer in quantizers if quantizer.accepts(name, source.whole)]
    whole = evolve(source, part=None)
    weight = cut(_quantized(name, read(whole), takers), source.part) if takers else read(source)
    # Rows of the embedding are looked up, not multiplied.
    return weight if name == EMBED else ops.pack(weight)


def _quantized(name: str, weight: Weight, quantizers: Sequence[Quantizer]) -> Weight:
    for quantizer in quantizers:
        weight = quantizer.quantize(name, weight)
    return weight
