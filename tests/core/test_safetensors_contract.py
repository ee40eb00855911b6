"""The safetensors loader under the contract of loaders: in one file, and in shards."""

import json

import pytest
from safetensors.torch import save_file

from intarsia.defaults.contract import SafetensorsContract


class TestSafetensors(SafetensorsContract):
    pass


@pytest.mark.slow
class TestShards(SafetensorsContract):
    def write(self, folder, tensors, config):
        super().write(folder, tensors, config)
        (folder / "model.safetensors").unlink()
        shards = {name: f"model-{turn % 3}.safetensors" for turn, name in enumerate(tensors)}
        for shard in set(shards.values()):
            save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        return folder
