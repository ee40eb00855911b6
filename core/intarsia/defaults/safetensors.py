"""The loader of Hugging Face folders with safetensors weights, in one file or in shards. Needs no torch to import."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from intarsia.checkpoints import INDEX, SINGLE, FolderCheckpoint, ModelFolder, open_tensors, read_config, read_sampling
from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, Unfit

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def fit(context: LoaderContext) -> Fit | Unfit:
    """Fit a folder that holds config.json and safetensors; say what is missing elsewhere, without opening a file."""
    path = context.path
    if not path.is_dir():
        if path.suffix.lower() in _PICKLES:
            return Unfit(_pickled([path.name]))
        return Unfit(f"{path.name} is a file; safetensors are loaded from a folder that holds config.json too")
    try:
        names = {entry.name for entry in path.iterdir()}
    except OSError as error:
        return Unfit(f"the folder cannot be listed: {error.strerror}")
    if not names & {SINGLE, INDEX}:
        if others := sorted(name for name in names if name.endswith(".safetensors")):
            return Unfit(f"the folder has {others[0]}, but no {SINGLE} and no {INDEX} that lists it")
        if pickles := sorted(name for name in names if name.lower().endswith(_PICKLES)):
            return Unfit(_pickled(pickles))
        return Unfit(f"the folder has no {SINGLE} and no {INDEX}")
    if "config.json" not in names:
        return Unfit("the folder has no config.json")
    return Fit(50, "a folder with config.json and safetensors")


def build(context: LoaderContext) -> SafetensorsLoader:
    """Make the loader."""
    return SafetensorsLoader(context.path)


def _pickled(names: Iterable[str]) -> str:
    return (
        f"its weights are pickles ({', '.join(list(names)[:3])}), which can run any code when they are loaded; "
        "convert them to safetensors"
    )


@frozen
class SafetensorsLoader:
    """Opens a Hugging Face folder."""

    path: Path

    def open(self) -> FolderCheckpoint:
        """Read the config, and the headers of all shards.

        Raises:
            CheckpointError: a file is missing, malformed or leads out of the folder; names file and tensor.
        """
        unfit = fit(LoaderContext(path=self.path))
        if isinstance(unfit, Unfit):
            raise CheckpointError(f"{self.path.name}: {unfit.reason}")
        folder = ModelFolder(self.path)
        config = read_config(folder)
        return FolderCheckpoint(folder, config, open_tensors(folder), read_sampling(folder))
