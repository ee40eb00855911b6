"""Weights as compressed-tensors stores them, and the `quantization_config` that describes them.

| weight format | folder's format | weights | activations |
| --- | --- | --- | --- |
| `int8` | `int-quantized` | 8 bits, a scale a row | 8 bits, a scale a token as they come |
| `int8_a16` | `pack-quantized` | 8 bits, a scale a row | as they are |
| `int8_g*` | `pack-quantized` | 8 bits, a scale a group | as they are |
| `int4_g*`, `int4_g*_zero` | `pack-quantized` | 4 bits, a scale (and a zero point) a group | as they are |

Others have no format there. Where a weight's own format lets kernels round activations and the folder's does not,
`intarsia_activations` in the config says so, by group; others ignore it.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.types import Weight
from intarsia_quantized.schemes import MARK

_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_INTEGERS, _PACKED, _MIXED = "int-quantized", "pack-quantized", "mixed-precision"
#: The version of compressed-tensors whose formats these are.
_VERSION = "0.20.1"


def compress(module: str, weight: Weight) -> dict[str, torch.Tensor]:
    """Return the tensors of a module.

    Raises:
        CheckpointError: compressed-tensors has no format for the weight; names it.
    """
    layout = weight.format
    if not isinstance(layout, IntegerFormat) or layout.offset == "min":
        raise CheckpointError(f"{module}: compressed-tensors has no format for weights in {layout.name}")
    columns = weight.shape[1]
    if layout.group is not None and columns % layout.group:
        raise CheckpointError(
            f"{module}: its {columns} columns are no whole groups of {layout.group}, which compressed-tensors asks "
            "for; a smaller group, such as -o quantizer.group=32, may fit"
        )
    scale = weight.tensors["scale"]
    tensors = {"weight_scale": (scale[:, None] if scale.dim() == 1 else scale).contiguous()}
    if _form(layout) == _INTEGERS:
        tensors["weight"] = weight.tensors["weight"].contiguous()
    else:
        tensors["weight_packed"] = _words(weight.tensors["weight"])
        tensors["weight_shape"] = torch.tensor(weight.shape)
    if layout.offset == "zero":
        tensors["weight_zero_point"] = _words(_nibbles(weight.tensors["zero"].t())).t().contiguous()
    return {f"{module}.{key}": tensor for key, tensor in tensors.items()}


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes as int32 words, the last filled up; int8 becomes numbers from 0."""
    packed = numbers.view(torch.uint8) ^ 0x80 if numbers.dtype == torch.int8 else numbers
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[1] % 4))
    # Not `contiguous`, for which strides of an axis of one do not matter; `view` asks for them.
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def _nibbles(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 15 two a byte, the half behind an odd last one 0."""
    padded = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return padded[:, 0::2] | (padded[:, 1::2] << 4)


def _form(layout: IntegerFormat) -> str:
    whole = layout.bits == 8 and layout.group is None and layout.activations == "int8"
    return _INTEGERS if whole else _PACKED


def quantization_config(formats: Mapping[str, IntegerFormat], others: Sequence[str]) -> dict[str, Any]:
    """Return the config of a folder.

    Args:
        formats: module -> its weight format.
        others: linear modules that are not quantized.
    """
    groups: dict[IntegerFormat, list[str]] = {}
    for module, layout in formats.items():
        groups.setdefault(layout, []).append(module)
    forms = {_form(layout) for layout in groups}
    config: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "version": _VERSION,
        "format": forms.pop() if len(forms) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": list(others),
        "kv_cache_scheme": None,
    }
    rounded = {}
    for index, (layout, members) in enumerate(groups.items()):
        name = f"group_{index}"
        config["config_groups"][name] = _group(layout, ["Linear"] if len(groups) == 1 else members)
        if _form(layout) == _PACKED and layout.activations == "int8":
            rounded[name] = "int8"
    return config | ({MARK: rounded} if rounded else {})


def _group(layout: IntegerFormat, targets: list[str]) -> dict[str, Any]:
    form = _form(layout)
    return {
        "targets": targets,
        "format": form,
        "weights": {
            "num_bits": layout.bits,
            "type": "int",
            "symmetric": layout.offset == "none",
            "strategy": "channel" if layout.group is None else "group",
            "group_size": layout.group,
            "dynamic": False,
        },
        "input_activations": _TOKENS if form == _INTEGERS else None,
        "output_activations": None,
    }
