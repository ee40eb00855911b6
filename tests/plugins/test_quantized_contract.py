"""Quantized folders under the contract of loaders."""

import json

import numpy as np
import torch
from safetensors.torch import save_file

from intarsia.testing.loaders import LoaderContract
from intarsia_quantized import provide_loaders
from quantized import compressed_config, packed_tensors, weights


def rounded(values, bits=4, group=32):
    """Return q from 0 (N, C), zero points, scales (N, G) and what they stand for, fp32."""
    rows, columns = values.shape
    middle = 1 << (bits - 1)
    groups = values.reshape(rows, -1, group)
    scale = (groups.abs().amax(-1) / (middle - 1)).clamp_min(1e-6).half()
    q = (groups / scale[..., None]).round().clamp(-middle, middle - 1) + middle
    means = ((q - middle) * scale[..., None]).reshape(rows, columns)
    zero = np.full(scale.shape, middle)
    return q.reshape(rows, columns).numpy().astype(np.int64), zero, scale, means


class TestPacked(LoaderContract):
    def provider(self):
        return provide_loaders()[0]

    def write(self, folder, tensors, config):
        made, self.means = {}, dict(tensors)
        for name, values in tensors.items():
            if name.endswith("_proj.weight"):
                q, zero, scale, self.means[name] = rounded(values)
                made |= packed_tensors(name.removesuffix(".weight"), q, zero, scale, bits=4, symmetric=True)
            else:
                made[name] = values
        save_file({name: values.contiguous() for name, values in made.items()}, folder / "model.safetensors")
        quantization = compressed_config(weights(4, group=32))
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
        return folder

    def stored(self, tensors):
        return {name: values.to(torch.float32) for name, values in self.means.items()}
