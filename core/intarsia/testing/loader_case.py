"""How a loader's contract runs it: on a tiny model in its format, whole and damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from attrs import field, frozen

from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
from intarsia.testing.claims import settle
from intarsia.testing.engines import configured, scratch, unharmed
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Checkpoint, EngineOptions, Fit, Provider, StoredTensor, Unfit

if TYPE_CHECKING:
    import torch

__all__ = ["LoaderCase", "Written", "files_of", "read", "read_as", "same_bits"]

T = TypeVar("T")


@frozen(eq=False)
class Written:
    """A tiny model, as Hugging Face has it and in the format of the loader on trial.

    Attributes:
        folder: with Hugging Face's files.
        path: what the loader is told.
        tensors: what the loader's files stand for.
    """

    folder: Path
    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)


class LoaderCase:
    """A loader on trial: subclasses say whose provider it is, and write files of its format.

    Attributes:
        options: the loader's own, as a config has them.
        texts: that its tokenizer must keep, where the files that `write` makes have one.
        patience_s: seconds within which a small file is opened or refused.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    texts: ClassVar[tuple[str, ...]] = ("Hello, world", " a  b\n\tc", "naïve 日本 🙂", "")
    patience_s: ClassVar[float] = 20.0

    def provider(self) -> Provider:
        """Return the loader's provider."""
        raise NotImplementedError("return the provider of the loader on trial")

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
        """Write a model in the loader's format; return the path that the loader is told: the folder, or a file in it.

        Args:
            folder: empty.
            tensors: of a llama, fp32, by Hugging Face's names.
            config: as its config.json has it.
        """
        raise NotImplementedError(
            "write the tensors and the config into the folder in the loader's format, and return the path to open"
        )

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the fp32 numbers that the files stand for: those that were written, unless the format rounds them."""
        return tensors

    # --- for the claims ---------------------------------------------------------------------------------------------

    @contextmanager
    def written(self, num_ids: int = 264) -> Iterator[Written]:
        """Lend a tiny model in the loader's format."""
        from safetensors.torch import load_file

        with scratch() as folder:
            theirs = save_tiny_model(folder / "hf", num_ids=num_ids)
            tensors = load_file(theirs / "model.safetensors")
            config = json.loads((theirs / "config.json").read_text())
            (folder / "own").mkdir()
            path = self.write(folder / "own", tensors, config)
            yield Written(theirs, path, config, self.stored(tensors))

    def context(self, path: Path) -> LoaderContext:
        """Return what the loader is built from."""
        options = configured(settle, self.provider(), "loader", dict(self.options))
        return LoaderContext(path=path, options=options, engine=EngineOptions(device="cpu", dtype="float32", threads=1))

    def fit(self, path: Path) -> Fit | Unfit:
        """Return whether the loader fits a path; it raises nothing."""
        found: Fit | Unfit = self._within(lambda: unharmed("fit", self.provider().fit, self.context(path)), "fit")
        assert isinstance(found, Fit | Unfit), f"fit returned {found!r}"
        assert isinstance(found, Fit) or found.reason, "it does not fit, and gives no reason"
        return found

    def open(self, path: Path) -> Checkpoint:
        """Open files; raise as the loader does."""
        checkpoint: Checkpoint = self.provider().build(self.context(path)).open()
        return checkpoint

    def opened(self, path: Path) -> Checkpoint:
        """Open files that are in order."""
        return unharmed("open", self.open, path)

    def attempt(self, path: Path) -> Checkpoint | CheckpointError:
        """Open files that may be damaged, and read all but the weights; what else is raised is a fault."""

        def all_but_weights() -> Checkpoint:
            checkpoint = self.open(path)
            checkpoint.tokenizer()
            assert isinstance(checkpoint.config, Mapping) and isinstance(checkpoint.sampling, Mapping)
            return checkpoint

        return self._within(lambda: _refusable(all_but_weights), "opening")

    def _within(self, call: Callable[[], T], doing: str) -> T:
        """Return what a call returns; one that takes too long, such as on a pipe, is left behind."""
        found: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.patience_s)
        if raised:
            raise raised[0]
        assert found, f"{doing} takes more than {self.patience_s:g} s"
        return found[0]


def _refusable(call: Callable[[], T]) -> T | CheckpointError:
    try:
        return call()
    except CheckpointError as error:
        return error
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error}; what is wrong with files is told by CheckpointError"
        ) from error


def read(tensor: StoredTensor, dtype: str = "float32") -> torch.Tensor:
    """Return a tensor's numbers; none may be left out."""
    import torch

    out = torch.full(tensor.shape, float("nan"), dtype=getattr(torch, dtype))
    unharmed(f"reading {tensor.name}", tensor.read, out)
    return out


def read_as(tensor: StoredTensor) -> torch.Tensor | CheckpointError:
    """Return a damaged tensor's numbers, or how it is refused."""
    import torch

    def values() -> torch.Tensor:
        out = torch.zeros(tensor.shape)
        tensor.read(out)
        return out

    return _refusable(values)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and numbers, NaN for NaN."""
    import torch

    return one.shape == other.shape and torch.equal(one.nan_to_num(7.0, 8.0, 9.0), other.nan_to_num(7.0, 8.0, 9.0))


def files_of(written: Written) -> list[Path]:
    """Return the files of the loader's format, the largest first."""
    root = written.folder.parent / "own"
    return sorted((path for path in root.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size)
