"""The GGUF loader under the contract of loaders: plain numbers, and quantized ones."""

import json

import pytest
import torch
from safetensors.torch import save_file

from intarsia_gguf.contract import GgufContract
from tools.gguf_models import write_gguf


class TestGguf(GgufContract):
    pass


@pytest.mark.slow
class TestQ8(GgufContract):
    def write(self, folder, tensors, config):
        theirs = folder.parent / "theirs"
        theirs.mkdir()
        save_file(tensors, theirs / "model.safetensors")
        rope = {"rope_parameters": {"rope_theta": config["rope_theta"]}}
        (theirs / "config.json").write_text(json.dumps(config | rope))
        self.means = write_gguf(theirs, folder / "model.gguf", q8_0=True)
        return folder / "model.gguf"

    def stored(self, tensors):
        return {name: torch.from_numpy(values.copy()) for name, values in self.means.items()}
