"""Tensors of a GGUF file, read in blocks: beside the tensor that is filled, a few megabytes are in use."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field, frozen

from intarsia.errors import CheckpointError
from intarsia_gguf.architectures import Architecture
from intarsia_gguf.header import Header, TensorInfo

if TYPE_CHECKING:
    import torch

#: Elements that are dequantized at a time: few enough for the processor's caches (measured: more is slower), and for
#: torch to copy them on this thread. Waking its others for each block costs up to 100 times as much on a busy machine.
BLOCK_ELEMENTS = 1 << 15


@frozen(eq=False)
class GgufTensor:
    """A tensor as `intarsia.types.StoredTensor` has it: one of the file, or the part of it that starts at `first`.

    Attributes:
        name: Hugging Face's name.
        info: where it lies, under GGUF's name.
        path: of the file, for messages.
        data: the file.
        rows: its shape as the file has it, rows first.
        first: how many elements of the file's tensor are before it.
        head_dim: rows of a head if llama.cpp reordered the rows within heads, else None.
        transposed: Hugging Face stores the matrix the other way round.
        shift: what is added to every number that the file stores.
    """

    name: str
    info: TensorInfo
    path: str = field(repr=False)
    data: mmap.mmap = field(repr=False)
    rows: tuple[int, ...]
    first: int = 0
    head_dim: int | None = None
    transposed: bool = False
    shift: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in Hugging Face's order."""
        return self.rows[::-1] if self.transposed else self.rows

    @property
    def format(self) -> str:
        """Its type's name."""
        return self.info.format.name

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.info.format.num_bytes(math.prod(self.rows))

    def read(self, out: torch.Tensor) -> None:
        """Dequantize into `out`, a tensor of this shape and any float dtype, contiguous or not.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        self.check_there()
        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} is not {self.shape}"
        target = out.t() if self.transposed else out
        for start, stop in self.blocks():
            place_rows(target[start:stop], self._dequantized(start, stop), self.head_dim)

    def read_slice(self, out: torch.Tensor, rows: range, columns: range) -> None:
        """Dequantize some rows, and of a matrix some of their columns; blocks without such rows stay unread.

        Raises:
            CheckpointError: as of `read`.
        """
        import torch

        self.check_there()
        target = out
        if self.transposed:
            target, rows, columns = out.t(), columns, rows
        for start, stop in self.blocks():
            first, last = max(start, rows.start), min(stop, rows.stop)
            if first >= last:
                continue
            block = self._dequantized(start, stop)
            ordered = torch.empty_like(block)
            place_rows(ordered, block, self.head_dim)
            part = ordered[first - start : last - start]
            if len(self.rows) == 2:
                part = part[:, columns.start : columns.stop]
            target[first - rows.start : last - rows.start].copy_(part)

    def _dequantized(self, start: int, stop: int) -> torch.Tensor:
        """Return these rows in float32, in the file's order."""
        import torch

        values = self.info.format.dequantize(self.raw(start, stop).reshape(-1))
        block = torch.from_numpy(values).view(stop - start, *self.rows[1:])
        if self.shift:
            block += self.shift
        return block

    def check_there(self) -> None:
        """Raise CheckpointError if the file has become shorter since it was opened.

        The system would end the process that reads a map past the end of its file.
        """
        if self.data.size() < self.info.offset + self.info.num_bytes:
            raise CheckpointError(f"{self.path}: the file was cut short while it was open; {self.info.name!r} is gone")

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Give the rows that are read at a time, from and to: of whole groups (a vector's rows are single elements)
        and of whole heads.
        """
        step = self.info.format.group if len(self.rows) == 1 else 1
        step = math.lcm(step, self.head_dim or 1)
        num_rows = max(1, BLOCK_ELEMENTS // (math.prod(self.rows[1:]) * step)) * step
        for start in range(0, self.rows[0], num_rows):
            yield start, min(start + num_rows, self.rows[0])

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes of these rows as they lie in the file, one group a row, uint8 and writable."""
        fmt, columns = self.info.format, math.prod(self.rows[1:])
        offset = self.info.offset + fmt.num_bytes(self.first + start * columns)
        # A slice of the map is a copy: torch wants memory it may write to, and no view keeps the map from closing.
        raw = bytearray(self.data[offset : offset + fmt.num_bytes((stop - start) * columns)])
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, fmt.group_bytes)


def place_rows(target: torch.Tensor, block: torch.Tensor, head_dim: int | None) -> None:
    """Copy rows, and undo llama.cpp's order of rows within heads where there is one.

    Rows 2i and 2i+1 of a head become rows i and i + head_dim / 2: inverse of `permute` in llama.cpp's
    convert_hf_to_gguf.py.
    """
    if head_dim is None:
        target.copy_(block)
        return
    halves = target.unflatten(0, (-1, 2, head_dim // 2))  # type: ignore[no-untyped-call]
    pairs = block.unflatten(0, (-1, head_dim // 2, 2))  # type: ignore[no-untyped-call]
    for part in (0, 1):
        halves[:, part].copy_(pairs[:, :, part])


@frozen
class Heads:
    """The heads of attention, as the order and the size of the tensors depend on them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def rows(self, name: str) -> int:
        """Return the rows of queries (`attn_q`), keys or values."""
        return self.head_dim * (self.num_heads if name == "attn_q" else self.num_kv_heads)


def stored_tensors(header: Header, architecture: Architecture, heads: Heads, num_experts: int) -> dict[str, GgufTensor]:
    """Return Hugging Face's name -> tensor.

    Raises:
        CheckpointError: a tensor's type cannot be dequantized, two tensors have one name, a tensor whose rows are
            reordered within heads has no whole number of heads, one that is several does not have their rows, or one
            of experts is not that of so many.
    """
    tensors: dict[str, GgufTensor] = {}
    unreadable = {fmt for fmt in {info.format for info in header.tensors} if not fmt.is_readable}
    for info in header.tensors:
        if info.format in unreadable:
            raise CheckpointError(
                f"{header.path}: tensor {info.name!r} is {info.format.name}, "
                "which this version of the gguf package cannot dequantize"
            )
        for tensor in _parts(header, info, architecture, heads, num_experts):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{header.path}: tensors {tensors[tensor.name].info.name!r} and {info.name!r} "
                    f"are both {tensor.name!r}"
                )
            tensors[tensor.name] = tensor
    return tensors


def _parts(
    header: Header, info: TensorInfo, architecture: Architecture, heads: Heads, num_experts: int
) -> Iterator[GgufTensor]:
    """Give the tensors of Hugging Face that one of the file is."""
    index, stem, kind = architecture.split(info.name)
    whole = GgufTensor(architecture.tensor_name(info.name), info, header.path, header.data, info.shape)
    if index and stem in architecture.fused:
        yield from _fused(whole, architecture, heads)
    elif index and kind == "weight" and stem in architecture.experts:
        prefix = f"{architecture.layers}.{index}"
        yield from _experts(whole, tuple(f"{prefix}.{name}" for name in architecture.experts[stem]), num_experts)
    else:
        head_dim = heads.head_dim if index and stem in architecture.permuted else None
        if head_dim is not None and info.shape[0] % head_dim:
            raise CheckpointError(
                f"{header.path}: tensor {info.name!r} has {info.shape[0]} rows, not a multiple of the head's {head_dim}"
            )
        yield evolve(
            whole,
            head_dim=head_dim,
            transposed=bool(index) and stem in architecture.transposed and len(info.shape) == 2,
            shift=-1.0 if info.name.endswith(architecture.shifted) else 0.0,
        )


def _fused(whole: GgufTensor, architecture: Architecture, heads: Heads) -> Iterator[GgufTensor]:
    """Give the parts of a tensor that holds several, their rows one after another."""
    index, stem, kind = architecture.split(whole.info.name)
    names, shape = architecture.fused[stem], whole.info.shape
    counts = [heads.rows(name) for name in names]
    if shape[0] != sum(counts):
        raise CheckpointError(
            f"{whole.path}: tensor {whole.info.name!r} has {shape[0]} rows, not the {sum(counts)} of {', '.join(names)}"
        )
    first = 0
    for name, rows in zip(names, counts, strict=True):
        head_dim = heads.head_dim if name in architecture.permuted else None
        theirs = f"{architecture.layers}.{index}.{architecture.layer[name]}.{kind}"
        yield _part(whole, theirs, (rows, *shape[1:]), first, head_dim)
        first += rows * math.prod(shape[1:])


def _experts(whole: GgufTensor, names: tuple[str, ...], num_experts: int) -> Iterator[GgufTensor]:
    """Give each expert's matrix, or its parts of equal size."""
    shape = whole.info.shape
    if len(shape) != 3 or shape[0] != num_experts or shape[1] % len(names):
        raise CheckpointError(
            f"{whole.path}: tensor {whole.info.name!r} has the shape {shape}, not the matrices of {num_experts} experts"
        )
    rows = (shape[1] // len(names), shape[2])
    for expert in range(num_experts):
        for number, name in enumerate(names):
            yield _part(whole, name.format(expert) + ".weight", rows, (expert * len(names) + number) * math.prod(rows))


def _part(whole: GgufTensor, name: str, rows: tuple[int, ...], first: int, head_dim: int | None = None) -> GgufTensor:
    group = whole.info.format.group
    if first % group or math.prod(rows) % group:
        raise CheckpointError(
            f"{whole.path}: tensor {whole.info.name!r} is {whole.format}, whose groups of {group} numbers "
            f"do not end where {name!r} does"
        )
    return evolve(whole, name=name, rows=rows, first=first, head_dim=head_dim)
