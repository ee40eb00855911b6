"""Tensors of a GGUF file, read in blocks: beside the tensor that is filled, a few megabytes are in use."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen

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
    """A tensor as `intarsia.types.StoredTensor` has it.

    Attributes:
        name: Hugging Face's name.
        info: where it lies, under GGUF's name.
        path: of the file, for messages.
        data: the file.
        head_dim: rows of a head if llama.cpp reordered the rows within heads, else None.
    """

    name: str
    info: TensorInfo
    path: str = field(repr=False)
    data: mmap.mmap = field(repr=False)
    head_dim: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, rows first."""
        return self.info.shape

    @property
    def format(self) -> str:
        """Its type's name."""
        return self.info.format.name

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.info.num_bytes

    def read(self, out: torch.Tensor) -> None:
        """Dequantize into `out`, a tensor of this shape and any float dtype, contiguous or not.

        Raises:
            CheckpointError: the file has become shorter since it was opened.
        """
        import torch

        if self.data.size() < self.info.offset + self.info.num_bytes:
            # The system would end the process that reads a map past the end of its file.
            raise CheckpointError(f"{self.path}: the file was cut short while it was open; {self.info.name!r} is gone")
        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} is not {self.shape}"
        row_elements = int(np.prod(self.shape[1:], dtype=np.int64))
        # Blocks hold whole groups (of a vector, rows are single elements) and whole heads.
        step = self.info.format.group if len(self.shape) == 1 else 1
        step = int(np.lcm(step, self.head_dim or 1))
        num_rows = max(1, BLOCK_ELEMENTS // (row_elements * step)) * step
        for start in range(0, self.shape[0], num_rows):
            stop = min(start + num_rows, self.shape[0])
            values = self._dequantize(start * row_elements, stop * row_elements)
            block = torch.from_numpy(values).view(stop - start, *self.shape[1:])
            if self.head_dim is None:
                out[start:stop].copy_(block)
            else:
                _copy_in_halves(out[start:stop], block, self.head_dim)

    def _dequantize(self, start: int, stop: int) -> np.ndarray:
        """Return the elements from `start` to `stop` of the tensor as it lies in the file, float32 and writable."""
        fmt = self.info.format
        offset = self.info.offset + fmt.num_bytes(start)
        # A slice of the map is a copy: torch wants memory it may write to, and no view keeps the map from closing.
        raw = bytearray(self.data[offset : offset + fmt.num_bytes(stop - start)])
        return fmt.dequantize(np.frombuffer(raw, dtype=np.uint8))


def _copy_in_halves(target: torch.Tensor, block: torch.Tensor, head_dim: int) -> None:
    """Undo llama.cpp's order of rows within heads: rows 2i and 2i+1 of a head become rows i and i + head_dim / 2.

    Inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    halves = target.unflatten(0, (-1, 2, head_dim // 2))  # type: ignore[no-untyped-call]
    pairs = block.unflatten(0, (-1, head_dim // 2, 2))  # type: ignore[no-untyped-call]
    for part in (0, 1):
        halves[:, part].copy_(pairs[:, :, part])


def stored_tensors(header: Header, architecture: Architecture, head_dim: int) -> dict[str, GgufTensor]:
    """Return Hugging Face's name -> tensor.

    Raises:
        CheckpointError: a tensor's type cannot be dequantized, two tensors have one name, or a tensor whose rows are
            reordered within heads has no whole number of heads.
    """
    tensors: dict[str, GgufTensor] = {}
    unreadable = {fmt for fmt in {info.format for info in header.tensors} if not fmt.is_readable}
    for info in header.tensors:
        if info.format in unreadable:
            raise CheckpointError(
                f"{header.path}: tensor {info.name!r} is {info.format.name}, "
                "which this version of the gguf package cannot dequantize"
            )
        name = architecture.tensor_name(info.name)
        if name in tensors:
            raise CheckpointError(
                f"{header.path}: tensors {tensors[name].info.name!r} and {info.name!r} are both {name!r}"
            )
        permuted = architecture.is_permuted(info.name)
        if permuted and info.shape[0] % head_dim:
            raise CheckpointError(
                f"{header.path}: tensor {info.name!r} has {info.shape[0]} rows, not a multiple of the head's {head_dim}"
            )
        tensors[name] = GgufTensor(name, info, header.path, header.data, head_dim if permuted else None)
    return tensors
