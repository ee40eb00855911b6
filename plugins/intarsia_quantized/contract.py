"""What the contract of loaders is told of `quantized`; `intarsia plugins check quantized` runs it.

The folder is packed here number by number, by no code of the loader's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia.testing.loaders import LoaderContract
from intarsia.types import Provider
from intarsia_quantized import provide_loaders

if TYPE_CHECKING:
    import torch

_GROUP = 32
#: The number of each four bits that stands for 0.
_MIDDLE = 8


class PackedContract(LoaderContract):
    """A folder that compressed-tensors packs: the layers' matrices in 4 bits, a scale for 32 of a row's numbers."""

    means: Mapping[str, torch.Tensor]

    def provider(self) -> Provider:
        return provide_loaders()[0]

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
        """Write the folder, and keep what it stands for."""
        from safetensors.torch import save_file

        made: dict[str, torch.Tensor] = {}
        means = dict(tensors)
        for name, values in tensors.items():
            if name.endswith("_proj.weight"):
                packed, means[name] = _packed(name, values)
                made |= packed
            else:
                made[name] = values
        self.means = means
        save_file({name: values.contiguous() for name, values in made.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": _quantization()}))
        return folder

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return what the folder stands for, fp32."""
        del tensors
        return {name: values.float() for name, values in self.means.items()}


def _packed(name: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a matrix's tensors, and what they stand for; (N, C) fp32, C in whole groups."""
    import torch

    rows, columns = values.shape
    groups = values.reshape(rows, -1, _GROUP)
    scale = (groups.abs().amax(-1) / (_MIDDLE - 1)).clamp_min(1e-6).half()
    numbers = (groups / scale[..., None]).round().clamp(-_MIDDLE, _MIDDLE - 1)
    # Eight numbers a word, the first in the lowest bits.
    places = torch.arange(0, 32, 4)
    words = ((numbers.long() + _MIDDLE).reshape(rows, -1, 8) << places).sum(-1)
    packed = {
        f"{name}_packed": torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32),
        f"{name}_shape": torch.tensor([rows, columns]),
        f"{name}_scale": scale,
    }
    return packed, (numbers * scale[..., None]).reshape(rows, columns)


def _quantization() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
