"""The tensors of a folder by the module that they belong to, with the checks that every decoder makes.

Every method that fails raises CheckpointError, which names the tensor, what it is and what would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from attrs import frozen

from intarsia.checkpoints import SafetensorsTensor
from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import unpack_nibbles
from intarsia.types import StoredTensor

#: The dtypes that scales are read from.
SCALES = ("F32", "BF16", "F16")


@frozen
class Module:
    """The tensors of one module: `model.layers.0.mlp.up_proj` has `qweight`, `scales` and so on.

    Attributes:
        tensors: by their names inside the module.
    """

    name: str
    tensors: Mapping[str, SafetensorsTensor]

    def need(
        self, part: str, beside: str, dtypes: Collection[str], shape: tuple[int | None, ...] | None = None
    ) -> SafetensorsTensor:
        """Return the tensor of this name; refuse another dtype or shape.

        Args:
            part: its name.
            beside: the tensor that cannot be without it, for the message.
            dtypes: those that it can have.
            shape: that it has, where a size of None is any from 1; None is any shape.
        """
        tensor = self.tensors.get(part)
        if tensor is None:
            raise CheckpointError(f"tensor {self.name}.{beside} is there without {self.name}.{part}")
        if tensor.format not in dtypes:
            raise CheckpointError(f"tensor {tensor.name!r} is stored as {tensor.format}, not as {' or '.join(dtypes)}")
        if shape is None:
            return tensor
        fits = len(tensor.shape) == len(shape) and all(
            size > 0 if wanted is None else size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not fits:
            shown = ", ".join("any" if size is None else str(size) for size in shape)
            raise CheckpointError(
                f"tensor {tensor.name!r} has the shape {tensor.shape}, not ({shown}), as the config says"
            )
        return tensor

    def num_bytes(self, parts: Collection[str]) -> int:
        """Return the bytes of those that are there."""
        return sum(self.tensors[part].num_bytes for part in parts if part in self.tensors)


def modules(tensors: Mapping[str, SafetensorsTensor]) -> dict[str, Module]:
    """Return the modules by name."""
    found: dict[str, dict[str, SafetensorsTensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = tensor
    return {name: Module(name, parts) for name, parts in found.items()}


def decoded(
    tensors: Mapping[str, SafetensorsTensor],
    parts: Collection[str],
    holder: str,
    matrix: Callable[[Module], StoredTensor],
) -> dict[str, StoredTensor]:
    """Return a model's tensors by their plain names, where quantized modules have tensors of their own names.

    Args:
        tensors: of the folder.
        parts: names of tensors that quantized modules alone have.
        holder: the one of them that none is without.
        matrix: returns the weight of a quantized module.

    Raises:
        CheckpointError: a module has some of these without the holder, or a plain weight beside it.
    """
    found: dict[str, StoredTensor] = {}
    for module in modules(tensors).values():
        quantized = holder in module.tensors
        if orphan := next((part for part in parts if part in module.tensors and not quantized), None):
            raise CheckpointError(f"tensor {module.name}.{orphan} is there without {module.name}.{holder}")
        if quantized and "weight" in module.tensors:
            raise CheckpointError(f"{module.name} has both weight and {holder}")
        for part, tensor in module.tensors.items():
            if part == holder:
                found[f"{module.name}.weight"] = matrix(module)
            elif part not in parts:
                found[tensor.name] = tensor
    return found


def group_of(tensor: SafetensorsTensor, num_groups: int, group: int) -> torch.Tensor | None:
    """Return the group of each column, (C,) int64, as a tensor says it; None where groups of so many are in order."""
    found = tensor.load().long()
    if bool((found < 0).any()) or bool((found >= num_groups).any()):
        raise CheckpointError(f"tensor {tensor.name!r} names groups beyond the {num_groups} that there are")
    return None if torch.equal(found, torch.arange(len(found)) // group) else found


def bytes_of(words: torch.Tensor) -> torch.Tensor:
    """Return int32 words (N, W) as bytes (N, 4 W), the lowest first."""
    return words.contiguous().view(torch.uint8)


def unsigned(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the whole numbers from 0 that int32 words (N, W) hold, from the lowest bits up, in uint8."""
    packed = bytes_of(words)
    return unpack_nibbles(packed) if bits == 4 else packed


def centred(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 255 less 128, in int8."""
    return (numbers ^ 0x80).view(torch.int8)
