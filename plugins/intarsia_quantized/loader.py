"""The loader `quantized`: Hugging Face folders whose config has a `quantization_config`.

| `quant_method` | read by |
| --- | --- |
| `compressed-tensors` | `compressed_tensors.py` |
| `gptq` | `gptq.py` |
| `awq` | `awq.py` |
| `intarsia`, our own | `sparse24.py` |

What is read has the model's names, and each quantized matrix is a stored weight; scales, zero points and the like are
part of it. Needs no torch to import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from intarsia.checkpoints import (
    INDEX,
    SINGLE,
    FolderCheckpoint,
    ModelFolder,
    SafetensorsTensor,
    open_tensors,
    read_config,
    read_sampling,
)
from intarsia.errors import CheckpointError
from intarsia.families import Fields
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, StoredTensor, Unfit
from intarsia_quantized.options import QuantizedOptions

#: Where a config says how its tensors are quantized; the second is what older files call it.
_KEYS = ("quantization_config", "compression_config")
_METHODS = {"compressed-tensors": "compressed_tensors", "gptq": "gptq", "awq": "awq", "intarsia": "sparse24"}


def fit(context: LoaderContext) -> Fit | Unfit:
    """Fit a folder whose config.json says that its tensors are quantized, by whatever method: `open` names another."""
    if not context.path.is_dir():
        return Unfit(f"{context.path.name} is a file; quantized models are loaded from a folder")
    folder = ModelFolder(context.path)
    try:
        config = read_config(folder)
        if folder.find(SINGLE) is None and folder.find(INDEX) is None:
            return Unfit(f"the folder has no {SINGLE} and no {INDEX}")
    except CheckpointError as error:
        return Unfit(str(error))
    key = _key(config)
    if key is None:
        return Unfit(f"its config.json has no {_KEYS[0]}")
    return Fit(60, f"a folder with safetensors and a {key}")


def _key(config: Mapping[str, Any]) -> str | None:
    return next((key for key in _KEYS if config.get(key) is not None), None)


def build(context: LoaderContext) -> QuantizedLoader:
    """Make the loader."""
    return QuantizedLoader(context.path, context.options)


@frozen
class QuantizedLoader:
    """Opens a quantized folder."""

    path: Path
    options: QuantizedOptions

    def open(self) -> FolderCheckpoint:
        """Read the config and the headers of all shards, and match them.

        Raises:
            CheckpointError: a file is missing or malformed, the method is not known, or config and tensors differ.
        """
        unfit = fit(LoaderContext(path=self.path))
        if isinstance(unfit, Unfit):
            raise CheckpointError(f"{self.path.name}: {unfit.reason}")
        folder = ModelFolder(self.path)
        config = read_config(folder)
        key = _key(config)
        assert key is not None
        fields = Fields(config).table(key)
        method = fields.choice("quant_method", _METHODS, "compressed-tensors" if key == _KEYS[1] else "")
        tensors = _decoder(method)(open_tensors(folder), fields, self.options)
        plain = {name: value for name, value in config.items() if name not in _KEYS}
        return FolderCheckpoint(folder, plain, tensors, read_sampling(folder))


def _decoder(
    module: str,
) -> Callable[[Mapping[str, SafetensorsTensor], Fields, QuantizedOptions], Mapping[str, StoredTensor]]:
    decode: Callable[..., Mapping[str, StoredTensor]] = importlib.import_module(f"intarsia_quantized.{module}").decode
    return decode
