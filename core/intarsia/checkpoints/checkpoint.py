"""A Hugging Face folder as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from intarsia.checkpoints.folder import ModelFolder, read_tokenizer
from intarsia.checkpoints.safetensors import FLOATS
from intarsia.types import StoredTensor, TokenizerSpec


@frozen(eq=False)
class FolderCheckpoint:
    """An open folder as `intarsia.types.Checkpoint` has it: its config, and tensors that are read on demand."""

    folder: ModelFolder
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    sampling: Mapping[str, Any] = field(factory=dict)

    @property
    def dtype(self) -> str:
        """The widest floating dtype among the tensors."""
        stored = {tensor.format for tensor in self.tensors.values()}
        return next((name for kind, name in FLOATS.items() if kind in stored), "float32")

    @property
    def keeps_weights(self) -> bool:
        """Quantized folders were made to be run as they are."""
        return True

    def tokenizer(self) -> TokenizerSpec | None:
        """Return the tokenizer, or None where the folder has none; raise CheckpointError where it is malformed."""
        return read_tokenizer(self.folder, self.config)
