"""What the inputs of a model's linear layers look like on real text: a safetensors file that calibration writes.

| tensor | dtype | shape | |
| --- | --- | --- | --- |
| `{name}.largest` | float32 | (C,) | largest magnitude of each input |
| `{name}.mean_square` | float32 | (C,) | mean of its squares |
| `{name}.sample` | bfloat16 | (M, C) | inputs of some tokens, spread over the text |

`name` is a linear's canonical name, such as `layers.0.qkv`; the head is `head`. The file's metadata say `format`
(`intarsia-calibration`), `model` and `tokens`, the number of tokens that were run.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from intarsia.errors import ConfigError

KIND = "intarsia-calibration"


@frozen(eq=False)
class InputStatistics:
    """One linear layer's inputs; see the module."""

    largest: torch.Tensor
    mean_square: torch.Tensor
    sample: torch.Tensor

    def is_whole(self) -> bool:
        """Whether shapes agree, and all numbers are finite."""
        tensors = (self.largest, self.mean_square, self.sample)
        columns = self.largest.shape[-1:]
        return (
            [tensor.dim() for tensor in tensors] == [1, 1, 2]
            and all(tensor.shape[-1:] == columns and tensor.is_floating_point() for tensor in tensors)
            and all(bool(tensor.isfinite().all()) for tensor in tensors)
        )


@frozen(eq=False)
class Calibration:
    """Statistics of every linear layer by its canonical name, without `.weight`."""

    inputs: dict[str, InputStatistics]
    model: str
    num_tokens: int

    def of(self, name: str, columns: int, where: str) -> InputStatistics:
        """Return a linear's statistics.

        Args:
            name: canonical, with or without `.weight`.
            columns: how many inputs the linear has.
            where: the option that named this file, for messages.

        Raises:
            ConfigError: the file has none of that name, or of another number of inputs.
        """
        found = self.inputs.get(name.removesuffix(".weight"))
        if found is None:
            raise ConfigError(
                f"{where}: the calibration of {self.model!r} has nothing of {name!r}; calibrate this model", field=where
            )
        if len(found.largest) != columns:
            raise ConfigError(
                f"{where}: {name!r} has {columns} inputs, and {len(found.largest)} in the calibration of "
                f"{self.model!r}; calibrate this model",
                field=where,
            )
        return found

    def save(self, path: Path) -> None:
        """Write the file: all of it, or nothing where that fails. One that is there is replaced."""
        tensors = {
            f"{name}.{key}": getattr(found, key).contiguous()
            for name, found in self.inputs.items()
            for key in ("largest", "mean_square", "sample")
        }
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.touch()
            mode = unfinished.stat().st_mode  # as the user's other files have it; safetensors makes private ones
            save_file(tensors, unfinished, {"format": KIND, "model": self.model, "tokens": str(self.num_tokens)})
            unfinished.chmod(mode)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def open(cls, path: Path, where: str) -> Calibration:
        """Read the file; raise ConfigError in the name of the option `where` if it is not one."""
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                names = list(file.keys())
                tensors = {name: file.get_tensor(name) for name in names} if metadata.get("format") == KIND else {}
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError: torch cannot map it
            raise ConfigError(f"{where}: {str(path)!r} cannot be read: {error}", field=where) from None
        if not tensors:
            raise ConfigError(
                f"{where}: {str(path)!r} is no calibration; `intarsia calibrate MODEL --out FILE` writes one",
                field=where,
            )
        linears = {name.rpartition(".")[0] for name in tensors}
        try:
            inputs = {
                linear: InputStatistics(
                    tensors[f"{linear}.largest"], tensors[f"{linear}.mean_square"], tensors[f"{linear}.sample"]
                )
                for linear in linears
            }
        except KeyError as error:
            raise ConfigError(f"{where}: {str(path)!r} lacks the tensor {error}", field=where) from None
        for linear, found in inputs.items():
            if not found.is_whole():
                raise ConfigError(
                    f"{where}: {str(path)!r} holds statistics of {linear!r} that are malformed: of other shapes than "
                    "(C,), (C,) and (M, C), or not finite",
                    field=where,
                )
        tokens = metadata.get("tokens", "")
        return cls(inputs, metadata.get("model", ""), int(tokens) if tokens.isdecimal() else 0)
