"""What loaders do with files that are cut, changed, missing, or made to harm: they refuse them, and nothing else."""

from __future__ import annotations

import io
import math
import os
import random
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from intarsia.errors import CheckpointError
from intarsia.testing.engines import scratch
from intarsia.testing.loader_case import LoaderCase, Written, files_of, read_as, same_bits
from intarsia.types import Checkpoint

__all__ = ["DamageClaims"]

#: Where headers are: changes further behind are of weights, which can be anything.
_HEADERS = 2048
#: Changes to each file that `test_garbage_is_refused_or_read` tries.
_TRIES = 40


class DamageClaims(LoaderCase):
    """Claims on damaged files."""

    def test_a_file_that_is_cut_is_refused(self) -> None:
        """Cut anywhere, a file is refused when it is opened, by CheckpointError with its name, or is not missed."""
        with self.written() as written:
            for path in files_of(written):
                whole = path.read_bytes()
                for length in _cuts(len(whole)):
                    path.write_bytes(whole[:length])
                    found = self.attempt(written.path)
                    where = f"{path.name}, cut to {length} of {len(whole)} bytes"
                    if isinstance(found, CheckpointError):
                        assert path.name in str(found), f"{where}: {str(found)[:200]!r} does not name it"
                    else:
                        self._whole(found, written, where)
                path.write_bytes(whole)

    def _whole(self, checkpoint: Checkpoint, written: Written, where: str) -> None:
        """Raise AssertionError unless nothing that was written is missing."""
        assert checkpoint.tensors.keys() == written.tensors.keys(), f"{where}: it is opened with other tensors"
        for name, tensor in checkpoint.tensors.items():
            values = read_as(tensor)
            assert not isinstance(values, CheckpointError), f"{where}: opened as if whole, and read it is refused"
            assert same_bits(values, written.tensors[name]), f"{where}: {name} has other numbers"

    def test_garbage_is_refused_or_read(self) -> None:
        """With any bytes changed, files are refused by CheckpointError, or have no more tensors than they can hold."""
        with self.written() as written:
            for path in files_of(written):
                whole = path.read_bytes()
                for what, damaged in _damaged(whole):
                    path.write_bytes(damaged)
                    found = self.attempt(written.path)
                    if not isinstance(found, CheckpointError):
                        self._bounded(found, written, f"{path.name}, {what}")
                path.write_bytes(whole)

    def _bounded(self, checkpoint: Checkpoint, written: Written, where: str) -> None:
        """Raise AssertionError where tensors are larger than the files, or reading them breaks."""
        size = sum(path.stat().st_size for path in files_of(written))
        for name, tensor in checkpoint.tensors.items():
            assert 0 <= tensor.num_bytes <= size, f"{where}: {name} has {tensor.num_bytes} bytes, the files {size}"
            # Not even the smallest format has more than eight numbers a byte.
            assert math.prod(tensor.shape) <= 8 * size, f"{where}: {name} is {tensor.shape}, in files of {size} bytes"
            read_as(tensor)

    def test_what_is_missing_is_refused(self) -> None:
        """A file that is not there, a folder or a pipe in its place: refused by CheckpointError, or not missed."""
        with self.written() as written, scratch() as elsewhere:
            for path in (elsewhere / "nothing", elsewhere, written.path.parent.parent):
                self.fit(path)
                found = self.attempt(path)
                assert isinstance(found, CheckpointError), f"{path.name} is no model, and is opened as one"
            for path in files_of(written):
                aside = path.rename(elsewhere / "aside")
                self._without(written, f"without {path.name}")
                path.mkdir()
                self._without(written, f"with a folder in the place of {path.name}")
                path.rmdir()
                if hasattr(os, "mkfifo"):
                    os.mkfifo(path)
                    self._without(written, f"with a pipe in the place of {path.name}")
                    path.unlink()
                aside.rename(path)

    def _without(self, written: Written, where: str) -> None:
        self.fit(written.path)
        found = self.attempt(written.path)
        if not isinstance(found, CheckpointError):
            self._whole(found, written, where)

    def test_nothing_is_run_that_files_hold(self) -> None:
        """Pickles, which run what they like when they are loaded, are not loaded: under no name, in no archive."""
        with self.written() as written, scratch() as elsewhere:
            marker = elsewhere / "marker"
            for name, harmful in _harmful(marker):
                for path in files_of(written):
                    whole = path.read_bytes()
                    path.write_bytes(harmful)
                    self._unharmed(written.path, marker, f"{path.name} holding {name}")
                    path.write_bytes(whole)
                for beside in ("pytorch_model.bin", "model.pt", "weights.pkl", "consolidated.00.pth"):
                    extra = files_of(written)[0].parent / beside
                    extra.write_bytes(harmful)
                    self._unharmed(written.path, marker, f"{beside} holding {name}")
                    extra.unlink()

    def _unharmed(self, path: Path, marker: Path, where: str) -> None:
        self.fit(path)
        found = self.attempt(path)
        if not isinstance(found, CheckpointError):
            for tensor in found.tensors.values():
                read_as(tensor)
        assert not marker.exists(), f"{where}: it was loaded, and ran"


def _cuts(size: int) -> list[int]:
    """Return lengths to cut a file to."""
    near = {0, 1, 3, 7, 8, 9, 16, 33, size // 8, size // 4, size // 2, size - 100, size - 8, size - 1}
    return sorted(length for length in near if 0 <= length < size)


def _damaged(whole: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a file's bytes with changes, and what was changed."""
    draws = random.Random(len(whole))
    yield "empty", b""
    yield "a text", b"hello\n"
    yield "zeros", bytes(len(whole))
    yield "random bytes", draws.randbytes(len(whole))
    yield "an empty archive", b"PK\x05\x06" + bytes(18)
    yield "a list", b"[" * 20000
    yield "with more behind it", whole + b"\0" * 5
    for turn in range(_TRIES):
        place = draws.randrange(min(len(whole), _HEADERS))
        new = (bytes([draws.randrange(256)]), b"\xff" * 8, b'"', b"9" * 12)[turn % 4]
        yield f"{new!r} at byte {place}", whole[:place] + new + whole[place + len(new) :]
    numbers = list(re.finditer(rb"\d+", whole[:_HEADERS]))
    for found in draws.sample(numbers, min(len(numbers), _TRIES // 2)):
        larger = b"9" * len(found[0])
        yield f"{larger!r} for {found[0]!r}", whole[: found.start()] + larger + whole[found.end() :]


def _harmful(marker: Path) -> Iterator[tuple[str, bytes]]:
    """Yield files that make a marker if they are unpickled, written by hand."""
    path = str(marker).encode()
    old = b"cbuiltins\nopen\n(V" + path + b"\nVw\ntR."
    new = b"\x80\x04cbuiltins\nopen\n(X" + struct.pack("<I", len(path)) + path + b"X\x01\x00\x00\x00wtR."
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + new
    yield "a pickle", new
    yield "an old pickle", old
    yield "an array of objects", array
    yield "an archive of arrays", _archive({"model.embed_tokens.weight.npy": array, "config.npy": array})
    yield "an archive of torch", _archive({"archive/data.pkl": new, "archive/version": b"3\n"})


def _archive(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()
