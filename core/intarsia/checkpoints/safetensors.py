"""The tensors of safetensors files, in one file or in shards. Needs no torch to import.

The format: 8 bytes with the header's length, little-endian; the header, a JSON object of tensor -> dtype, shape and
byte range; the bytes. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from attrs import field, frozen

from intarsia.checkpoints.folder import ModelFolder, parse_object, read_index
from intarsia.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: The format's own limit on the header.
_MAX_HEADER = 100_000_000
_MAX_DIMS = 8
#: Bits of one number, for every dtype of the format.
_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
#: The dtypes that weights can be read from, widest first, with torch's names.
FLOATS = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
#: Those that `load` knows, with torch's names.
_LOADED = FLOATS | {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
#: Bytes that are converted at a time: small enough for a core's cache, large enough to cost nothing.
_CHUNK = 1 << 20


@frozen(eq=False)
class _Shard:
    """One file, mapped into memory read-only: its pages are the file's own, and no anonymous memory."""

    name: str
    path: Path
    map: mmap.mmap = field(repr=False)

    def check_size(self) -> None:
        """Raise CheckpointError where the file has shrunk since: reading past its end would kill the process."""
        if self.path.stat().st_size < len(self.map):
            raise CheckpointError(f"{self.name} was cut short while it was in use")


@frozen(eq=False)
class SafetensorsTensor:
    """A tensor of a shard, at `offset` bytes from its start, as `intarsia.types.StoredTensor` has it."""

    name: str
    shape: tuple[int, ...]
    format: str
    num_bytes: int
    offset: int
    shard: _Shard

    def read(self, out: torch.Tensor) -> None:
        """Copy the values into `out`, converted to its dtype, a chunk at a time.

        Raises:
            CheckpointError: the tensor is not stored as floats, or its file has shrunk.
        """
        import numpy as np
        import torch

        assert tuple(out.shape) == self.shape, f"{self.name}: {tuple(out.shape)} is not {self.shape}"
        self._check_floats()
        if not self.num_bytes:
            return
        target = out.view(-1) if out.is_contiguous() else out
        row_bytes = self.num_bytes // target.shape[0]
        rows = max(1, _CHUNK // row_bytes)
        # Not torch.empty: its aligned blocks leave holes on glibc's heap that the next of the same size does not fit.
        scratch = np.empty(min(rows, target.shape[0]) * row_bytes, np.uint8)
        for start in range(0, target.shape[0], rows):
            part = target[start : start + rows]
            size = part.shape[0] * row_bytes
            source = np.frombuffer(self.shard.map, np.uint8, size, self.offset + start * row_bytes)
            scratch[:size] = source
            part.copy_(torch.from_numpy(scratch[:size]).view(getattr(torch, FLOATS[self.format])).view(part.shape))

    def read_slice(self, out: torch.Tensor, rows: range, columns: range) -> None:
        """Copy some rows, and of a matrix some of their columns, into `out`, converted to its dtype, a chunk at a time.

        Pages of the file beside these are not touched.

        Raises:
            CheckpointError: as of `read`.
        """
        import numpy as np
        import torch

        self._check_floats()
        if not out.numel():
            return
        itemsize = _BITS[self.format] // 8
        width = math.prod(self.shape[1:])
        first, last = (columns.start, columns.stop) if len(self.shape) == 2 else (0, width)
        assert tuple(out.shape) == (len(rows), *([last - first] if len(self.shape) == 2 else self.shape[1:]))
        start = self.offset + rows.start * width * itemsize
        stored = np.frombuffer(self.shard.map, np.uint8, len(rows) * width * itemsize, start)
        stored = stored.reshape(len(rows), -1)[:, first * itemsize : last * itemsize]
        step = max(1, _CHUNK // ((last - first) * itemsize))
        scratch = np.empty((min(step, len(rows)), stored.shape[1]), np.uint8)
        for begin in range(0, len(rows), step):
            part = out[begin : begin + step]
            some = scratch[: part.shape[0]]
            some[:] = stored[begin : begin + step]
            part.copy_(torch.from_numpy(some).view(getattr(torch, FLOATS[self.format])).view(part.shape))

    def _check_floats(self) -> None:
        """Raise CheckpointError where the tensor is not stored as floats, or its file has shrunk."""
        if self.format not in FLOATS:
            raise CheckpointError(
                f"{self.shard.name}: tensor {self.name!r} is stored as {self.format}; readable are {', '.join(FLOATS)}"
            )
        self.shard.check_size()

    def load(self) -> torch.Tensor:
        """Return the tensor in the dtype that it is stored in, in memory of its own.

        Raises:
            CheckpointError: the dtype is none of torch's common ones, or the file has shrunk.
        """
        import torch

        if self.format not in _LOADED:
            raise CheckpointError(
                f"{self.shard.name}: tensor {self.name!r} is stored as {self.format}; readable are {', '.join(_LOADED)}"
            )
        self.shard.check_size()
        data = torch.empty(self.num_bytes, dtype=torch.uint8)
        data.numpy()[:] = memoryview(self.shard.map)[self.offset : self.offset + self.num_bytes]
        return data.view(getattr(torch, _LOADED[self.format])).view(self.shape)


def open_tensors(folder: ModelFolder) -> dict[str, SafetensorsTensor]:
    """Return the tensors of all shards. As in transformers, a single file goes before an index.

    Raises:
        CheckpointError: a file is missing, malformed or leads out of the folder; names file and tensor.
    """
    if (path := folder.find(SINGLE)) is not None:
        return _open_shard(SINGLE, path)
    weight_map = read_index(folder, INDEX)
    if weight_map is None:
        raise CheckpointError(f"the folder has no {SINGLE} and no {INDEX}")
    tensors: dict[str, SafetensorsTensor] = {}
    owners: dict[str, str] = {}
    for shard, path in _shards(folder, weight_map).items():
        for name, tensor in _open_shard(shard, path).items():
            if name in owners:
                raise CheckpointError(f"tensor {name!r} is in two shards: {owners[name]} and {shard}")
            tensors[name], owners[name] = tensor, shard
    for name, shard in weight_map.items():
        if owners.get(name) != shard:
            raise CheckpointError(f"{INDEX}: tensor {name!r} is not in {shard}, where the index says it is")
    return tensors


def _shards(folder: ModelFolder, weight_map: Mapping[str, Any]) -> dict[str, Path]:
    """Return each shard that an index names, once every entry is known to be safe."""
    shards: dict[str, Path] = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard in shards:
            continue
        asked_by = f"{INDEX}: the entry of {name!r:.200}"
        path = folder.find(shard, asked_by)
        if not shard.endswith(".safetensors"):
            raise CheckpointError(f"{asked_by}: {shard!r:.200} is not a .safetensors file")
        if path is None:
            raise CheckpointError(f"{asked_by}: {shard!r:.200} is missing from the model's folder")
        shards[shard] = path
    return shards


def _open_shard(name: str, path: Path) -> dict[str, SafetensorsTensor]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{name}: no safetensors file, or cut short: it has {size} bytes and says that {length} are header"
                )
            header = parse_object(file.read(length), f"{name}, header")
            shard = _Shard(name, path, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {key: _tensor(key, entry, shard, start, size - start) for key, entry in header.items()}
    _check_ranges(name, tensors.values(), start, size)
    return tensors


def _tensor(name: str, entry: Any, shard: _Shard, start: int, data_size: int) -> SafetensorsTensor:
    """Read one entry of a header, which may hold anything."""
    where = f"{shard.name}: tensor {name!r:.200}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {entry!r:.200}, not by dtype, shape and data_offsets")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where} has the dtype {dtype!r:.200}, which is not one of the format's")
    if not _sizes(shape) or len(shape) > _MAX_DIMS:
        raise CheckpointError(f"{where} has the shape {shape!r:.200}, not up to {_MAX_DIMS} whole numbers")
    if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_size:
        raise CheckpointError(
            f"{where} has the byte range {offsets!r:.200}, not one within the {data_size} that follow"
        )
    bits, num_bytes = math.prod(shape) * _BITS[dtype], offsets[1] - offsets[0]
    if bits != num_bytes * 8:
        raise CheckpointError(f"{where} has {num_bytes} bytes; {dtype} of shape {shape!r:.200} takes {bits / 8:g}")
    return SafetensorsTensor(name, tuple(shape), dtype, num_bytes, start + offsets[0], shard)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of whole numbers from 0, each below 2**63."""
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 63 for number in value)


def _check_ranges(name: str, tensors: Iterable[SafetensorsTensor], start: int, size: int) -> None:
    """Check that the tensors lie end to end and fill the file, as the format demands: no overlap, nothing hidden."""
    end, before = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            how = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise CheckpointError(f"{name}: tensor {tensor.name!r} {how} {before}")
        end, before = end + tensor.num_bytes, f"tensor {tensor.name!r}"
    if end != size:
        raise CheckpointError(f"{name}: {size - end} bytes after {before} belong to no tensor")
