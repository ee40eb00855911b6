"""What tests of contrib share."""

import pytest

from models import tiny_llama


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model of next to no work, with the vocabulary and the context that the bench's workloads need."""
    sizes = {"hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "ffn": 16, "vocab": 40001, "max_len": 2560}
    path, _ = tiny_llama(tmp_path_factory.mktemp("models"), **sizes)
    (path / "tokenizer.json").unlink()
    return str(path)
