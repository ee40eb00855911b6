"""Opening a GGUF file as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from intarsia.errors import CheckpointError
from intarsia.types import TokenizerSpec
from intarsia_gguf.architectures import find_architecture
from intarsia_gguf.config import MAX_EXPERTS, read_config, read_heads, read_sampling
from intarsia_gguf.header import read_header
from intarsia_gguf.metadata import Metadata
from intarsia_gguf.rope import DIVISORS, LONG, SHORT, read_rope_tensors
from intarsia_gguf.stored import stored
from intarsia_gguf.tensors import GgufTensor, stored_tensors
from intarsia_gguf.tokenizer import check_tokenizer, read_tokenizer

#: Hugging Face's names of the floating types, the widest first.
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@frozen(eq=False)
class GgufCheckpoint:
    """A GGUF file as `intarsia.types.Checkpoint` has it."""

    metadata: Metadata = field(repr=False)
    config: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor] = field(repr=False)

    @property
    def dtype(self) -> str:
        """The widest floating dtype that a tensor is stored in; float16, that of their scales, if all are quantized."""
        formats = {tensor.format for tensor in self.tensors.values()}
        return next((dtype for name, dtype in _DTYPES.items() if name in formats), "float16")

    @property
    def sampling(self) -> Mapping[str, Any]:
        """What the metadata recommend for sampling, in Hugging Face's spelling."""
        return read_sampling(self.metadata)

    @property
    def keeps_weights(self) -> bool:
        """Not unless asked: what their numbers stand for is run exactly, and kept ones meet rounded activations."""
        return False

    def tokenizer(self) -> TokenizerSpec | None:
        """The tokenizer that the metadata describes, or None."""
        return read_tokenizer(self.metadata)


@frozen
class GgufLoader:
    """Opens one GGUF file."""

    path: Path

    def open(self) -> GgufCheckpoint:
        """Read the header and check all of it that can be checked without reading weights."""
        header = read_header(self.path)
        metadata = Metadata.of(header)
        if metadata.integer("split.count", low=0, default=1) > 1:
            metadata.fail("split.count", "says that this is a part of a split model; merge it with llama-gguf-split")
        if not header.tensors:
            raise CheckpointError(f"{self.path}: the file holds no tensors, so no model")
        name = metadata.text("general.architecture")
        num_experts = metadata.integer(f"{name}.expert_count", low=0, high=MAX_EXPERTS, default=0)
        architecture = find_architecture(header.path, name, num_experts)
        heads = read_heads(metadata, architecture)
        shapes = {info.name: info.shape for info in header.tensors}
        config = read_config(metadata, architecture, heads, shapes, read_rope_tensors(header))
        tensors = stored_tensors(header, architecture, heads, num_experts)
        for name in (DIVISORS, LONG, SHORT):
            # What they say is in the config by now.
            tensors.pop(name, None)
        check_tokenizer(metadata)
        return GgufCheckpoint(metadata, config, {name: stored(tensor) for name, tensor in tensors.items()})
