"""Weights that took long to quantize, kept on disk for the next start: one safetensors file each.

A file is named by the digest of all that its weight was made from: the numbers, the options, the calibration, the code.
So nothing stale is ever found, whatever the model's file is called and wherever it lies. Only what takes seconds is
worth it: rounding to nearest and packing for kernels take as long as reading a file does.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import time

import torch
from attrs import define, evolve, field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from intarsia.folders import CACHE_VARIABLE, cache_folder
from intarsia.quantizing.integers import FORMATS
from intarsia.quantizing.rotated import ROTATED
from intarsia.types import Weight, WeightFormat

logger = logging.getLogger("intarsia.quantizing")

_FORMATS: dict[str, WeightFormat] = {layout.name: layout for layout in FORMATS}
_FORMATS |= {layout.name: layout for layout in ROTATED}
_SUFFIX, _UNFINISHED = ".safetensors", ".unfinished"
#: A writer that is still at it after so long has died.
_ABANDONED_S = 3600
#: What is left free on the disk.
_RESERVE_BYTES = 1 << 30


def digest(*parts: object) -> str:
    """Return a digest of tensors, by dtype, shape and bits, and of anything else by what it looks like (`repr`)."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(f"{part.dtype} {tuple(part.shape)}\0".encode())
            found.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            found.update(f"{part!r}\0".encode())
    return found.hexdigest()


@functools.cache
def code_digest(*modules: str) -> str:
    """Return a digest of the Python files beside these files (`__file__`s), of this package and of torch's version."""
    folders = {Path(module).parent for module in (__file__, *modules)}
    files = sorted((file.name, file.read_bytes()) for folder in folders for file in folder.glob("*.py"))
    return digest(torch.__version__, *files)


@define(eq=False)
class RememberedWeights:
    """A folder of weights, those that were not used for longest going when it is full.

    Several processes may use one folder: files appear whole, and a file that is gone or damaged is as one that never
    was. What cannot be written is said once, and made again at the next start.

    Attributes:
        folder: where they are.
        most_bytes: what all of them may take.
    """

    folder: Path = field(factory=partial(cache_folder, "weights"))
    most_bytes: int = 8 << 30
    _complained: bool = field(default=False, init=False)

    def get(self, key: str, make: Callable[[], Weight], device: torch.device | None = None) -> Weight:
        """Return the weight of this key; make it and keep it where there is none.

        What is found is mapped, privately to this process: its tensors take memory as they are read, and may be written
        to.

        Args:
            key: a `digest` of all that it is made from.
            make: returns it; of a format of `intarsia.quantizing.integers`.
            device: where what is found goes; None is the CPU.
        """
        found = self._read(key)
        if found is None:
            found = make()
            self._write(key, found)
        elif device is not None:
            found = evolve(found, tensors={name: tensor.to(device) for name, tensor in found.tensors.items()})
        return found

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _read(self, key: str) -> Weight | None:
        path = self._path(key)
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
            shape = tuple(map(int, metadata["shape"].split()))
            weight = Weight(_FORMATS[metadata["format"]], tensors, shape)
            if _contents(weight) != metadata["digest"]:
                return None
            os.utime(path)
        # RuntimeError is torch's, which opens the file again to map it: another process may have removed it since.
        except (OSError, RuntimeError, SafetensorError, KeyError, ValueError):
            return None
        return weight

    def _write(self, key: str, weight: Weight) -> None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weight.tensors.items()}
        metadata = {
            "format": weight.format.name,
            "shape": " ".join(map(str, weight.shape)),
            "digest": _contents(weight),
        }
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if shutil.disk_usage(self.folder).free < weight.num_bytes + _RESERVE_BYTES:
                raise OSError("the disk is nearly full")
            with _appearing(self._path(key)) as path:
                save_file(tensors, path, metadata)
            self._prune()
        except (OSError, SafetensorError) as error:
            if not self._complained:
                logger.warning(
                    "quantized weights cannot be kept in %s, so each start makes them again: %s; %s names a folder",
                    self.folder,
                    error,
                    CACHE_VARIABLE,
                )
            self._complained = True

    def _prune(self) -> None:
        """Remove what was not used for longest, and what dead writers have left."""
        kept = 0
        for path, status in _newest_first(self.folder.iterdir()):
            if path.suffix == _UNFINISHED:
                if status.st_mtime < time() - _ABANDONED_S:
                    path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                kept += status.st_size
                if kept > self.most_bytes:
                    path.unlink(missing_ok=True)


def _contents(weight: Weight) -> str:
    parts = [part for name in sorted(weight.tensors) for part in (name, weight.tensors[name])]
    return digest(weight.format.name, tuple(weight.shape), *parts)


@contextlib.contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    """Give the path of a file that becomes this one, whole, at the end."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_UNFINISHED)
    os.close(descriptor)
    unfinished = Path(name)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _newest_first(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):  # another process has removed it
            found.append((path, path.stat()))
    return sorted(found, key=lambda each: each[1].st_mtime, reverse=True)
