"""What the contract of drafters is told of these; `intarsia plugins check speculative` runs it.

Those that look at the time that steps take (`adaptive`) do not repeat themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from intarsia.testing.drafters import DrafterContract
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Provider
from intarsia_speculative import provide_drafters


def _provided(key: str) -> Provider:
    return next(provider for provider in provide_drafters() if provider.key == key)


class NgramContract(DrafterContract):
    """It guesses from one token on, so that random answers have guesses."""

    options: ClassVar[Mapping[str, Any]] = {"k": 5, "min_n": 1}
    repeats: ClassVar[bool] = False

    def provider(self) -> Provider:
        return _provided("ngram")


class SuffixContract(DrafterContract):
    """It guesses from one token on, so that random answers have guesses."""

    options: ClassVar[Mapping[str, Any]] = {"k": 5, "min_match": 1}
    repeats: ClassVar[bool] = False

    def provider(self) -> Provider:
        return _provided("suffix")


class LayerSkipContract(DrafterContract):
    """The first of the tiny model's layers guesses."""

    options: ClassVar[Mapping[str, Any]] = {"k": 3, "layers": 1, "adaptive": False}

    def provider(self) -> Provider:
        return _provided("layer_skip")


class DraftModelContract(DrafterContract):
    """A second tiny model guesses, which is saved beside the first."""

    settings: ClassVar[Mapping[str, Any]] = {"k": 3, "memory": "1MiB", "adaptive": False}

    def provider(self) -> Provider:
        return _provided("draft_model")

    def model(self, folder: Path) -> Path:
        """Save both."""
        second = save_tiny_model(folder / "second", num_ids=self.num_ids, layers=1, seed=3)
        type(self).options = {**self.settings, "model": str(second)}
        return super().model(folder)
