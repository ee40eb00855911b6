"""What the contracts are told of the defaults; `intarsia plugins check defaults` runs these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from intarsia.defaults import provide_loaders, provide_schedulers
from intarsia.testing.loaders import LoaderContract
from intarsia.testing.schedulers import SchedulerContract
from intarsia.testing.tiny_tokenizer import save_byte_tokenizer
from intarsia.types import Provider

if TYPE_CHECKING:
    import torch


class SafetensorsContract(LoaderContract):
    """A folder as Hugging Face saves it, its weights in one file."""

    def provider(self) -> Provider:
        return provide_loaders()[0]

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
        """Write weights, config and tokenizer; return the folder."""
        from safetensors.torch import save_file

        save_file(dict(tensors), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(config)))
        return save_byte_tokenizer(folder)


class StaticContract(SchedulerContract):
    """What a scheduler whose batches run to their end does not promise."""

    ages: ClassVar[bool] = False  # of a higher priority one can always come before the next batch
    preempts: ClassVar[bool] = False  # a sequence reserves the most that it can hold

    def provider(self) -> Provider:
        return next(each for each in provide_schedulers() if each.key == "static")
