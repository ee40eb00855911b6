"""The safetensors loader under the contract of loaders: in one file, and in shards."""

import json

import pytest
from safetensors.torch import save_file

from intarsia.defaults import provide_loaders
from intarsia.testing.loaders import LoaderContract
from intarsia.testing.tiny_tokenizer import save_byte_tokenizer


class TestSafetensors(LoaderContract):
    def provider(self):
        return provide_loaders()[0]

    def write(self, folder, tensors, config):
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return save_byte_tokenizer(folder)


@pytest.mark.slow
class TestShards(TestSafetensors):
    def write(self, folder, tensors, config):
        super().write(folder, tensors, config)
        (folder / "model.safetensors").unlink()
        shards = {name: f"model-{turn % 3}.safetensors" for turn, name in enumerate(tensors)}
        for shard in set(shards.values()):
            save_file({name: tensors[name] for name in tensors if shards[name] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
        return folder
