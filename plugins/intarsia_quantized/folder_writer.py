"""A folder that appears whole or not at all: written under another name beside its place, and moved at the end."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, field
from safetensors.torch import save_file

from intarsia.checkpoints import INDEX, SINGLE
from intarsia.errors import ConfigError

#: Bytes of a shard at most, but for a larger tensor, which is one alone. Others expect less than 5 GB.
SHARD_BYTES = 2_000_000_000


@define(eq=False)
class FolderWriter:
    """Collects a model's files.

    Attributes:
        path: where they are written until they are whole.
        shard_bytes: of a shard at most.
    """

    path: Path
    shard_bytes: int = SHARD_BYTES
    num_bytes: int = field(default=0, init=False)
    _pending: dict[str, torch.Tensor] = field(factory=dict, init=False)
    _pending_bytes: int = field(default=0, init=False)
    _shards: list[list[str]] = field(factory=list, init=False)

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors, which belong together; write a shard where they would not fit the one that is begun."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self.shard_bytes:
            self._write_shard()
        self._pending.update(tensors)
        self._pending_bytes += size

    def _write_shard(self) -> None:
        self._shards.append(list(self._pending))
        save_file(self._pending, self.path / f"{len(self._shards)}.part", {"format": "pt"})
        self.num_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def write_json(self, name: str, table: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        (self.path / name).write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Name the shards, and list them in an index where there are several; config.json is written by now."""
        self._write_shard()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards, start=1):
            shard = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self.path / f"{number}.part").rename(self.path / shard)
            weight_map |= dict.fromkeys(names, shard)
        mode = (self.path / "config.json").stat().st_mode  # safetensors lets only the owner read what it writes
        for shard in set(weight_map.values()):
            (self.path / shard).chmod(mode)
        if count > 1:
            self.write_json(INDEX, {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map})


@contextmanager
def writing(out: Path, source: Path | None, *, force: bool) -> Iterator[FolderWriter]:
    """Lend a writer; move what it wrote to `out` at the end, or leave nothing where anything failed.

    Args:
        out: the folder.
        source: the folder that the model is read from, which is never written to.
        force: take a folder that holds files: those of the same names, and weights, are replaced.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    out = out.absolute()
    if source is not None and out.resolve() == source.resolve():
        raise ConfigError(f"--out: {str(out)!r} is the folder that the model is read from", field="--out")
    try:
        if out.exists() and not out.is_dir():
            raise ConfigError(f"--out: {str(out)!r} is a file; a folder is written", field="--out")
        if not force and out.is_dir() and any(out.iterdir()):
            raise ConfigError(f"--out: {str(out)!r} holds files; --force replaces them", field="--out")
        out.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"--out: {str(out)!r} cannot be written: {error.strerror}", field="--out") from None
    try:
        writer = FolderWriter(staging)
        yield writer
        writer.finish()
        _move(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _move(staging: Path, out: Path) -> None:
    """Put the files in their place; weights of an older model go first, which would be read in their stead."""
    # The temporary folder is its maker's alone; the one that is left is as others are made.
    if not out.exists():
        out.mkdir()
    for stale in [*out.glob("model*.safetensors"), *out.glob(INDEX)]:
        if stale.is_file():
            stale.unlink()
    for file in sorted(staging.iterdir()):
        file.replace(out / file.name)
