"""Reading what one rank holds of a tensor, and cutting it out of a weight.

Tensors that can be read in slices are: then no more of the file is touched than the part needs. Others are read whole,
one at a time, and cut.

Shape legend: N rows, C columns, of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve

from intarsia.types import Checkpoint, Part, SliceableTensor, StoredTensor, TensorSource, Weight


def read_part(checkpoint: Checkpoint, source: TensorSource, dtype: torch.dtype) -> torch.Tensor:
    """Return a source's part in a dtype; its padding is zeros.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    part = source.part
    assert part is not None
    held = torch.empty(source.shape, dtype=dtype)
    columns = range(*(part.columns or (0, source.whole[1] if len(source.whole) == 2 else 0)))
    place = 0
    for name, rows in _stored_rows(source):
        stored, out = checkpoint.tensors[name], held[place : place + len(rows)]
        if source.transposed:
            _read_slice(stored, out.t(), columns, rows)
        else:
            _read_slice(stored, out, rows, columns)
        place += len(rows)
    if source.offset:
        held[:place] += source.offset
    held[place:] = 0
    return held


def _stored_rows(source: TensorSource) -> Iterator[tuple[str, range]]:
    """Yield the checkpoint's tensors that a part is read from, in order, each with its own rows."""
    part = source.part
    assert part is not None
    sizes = [source.whole[0]] if source.transposed else [shape[0] for shape in source.shapes]
    for start, stop in part.rows:
        first = 0
        for name, size in zip(source.names, sizes, strict=True):
            low, high = max(start, first), min(stop, first + size)
            if low < high:
                yield name, range(low - first, high - first)
            first += size


def _read_slice(stored: StoredTensor, out: torch.Tensor, rows: range, columns: range) -> None:
    if isinstance(stored, SliceableTensor):
        stored.read_slice(out, rows, columns)
        return
    whole = torch.empty(stored.shape, dtype=out.dtype)
    stored.read(whole)
    part = whole[rows.start : rows.stop]
    out.copy_(part if out.dim() == 1 else part[:, columns.start : columns.stop])


def cut(weight: Weight, part: Part | None) -> Weight:
    """Return a part of a whole weight in any format, in memory of its own; the weight itself where there is none.

    What pads it are copies of its first row: there is no row of zeros in every format.

    Raises:
        CompositionError: columns are cut within a group.
    """
    if part is None:
        return weight
    rows = [torch.arange(start, stop) for start, stop in part.rows]
    if part.padding or part.rows != ((0, weight.shape[0]),):
        index = torch.cat([*rows, torch.zeros(part.padding, dtype=torch.int64)])
        weight = weight.rows(index.to(next(iter(weight.tensors.values())).device))
    if part.columns is not None:
        weight = weight.shard(1, *part.columns)
    # A view would keep the whole in memory.
    return evolve(weight, tensors={key: tensor.clone() for key, tensor in weight.tensors.items()})
