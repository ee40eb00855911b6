"""What a machine with an NVIDIA GPU composes, without one: torch's facts of a device are faked, no weight is loaded."""

import types

import pytest
import torch

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import CompositionError
from intarsia.explain import explain
from intarsia.plugins import Registry
from intarsia.types import PluginsOptions
from models import tiny_llama

HOPPER = types.SimpleNamespace(
    name="a GPU",
    major=9,
    minor=0,
    multi_processor_count=132,
    shared_memory_per_multiprocessor=228 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    total_memory=80 << 30,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2)[0]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    for name, answer in {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (80 << 30, 80 << 30),
        "get_device_capability": (9, 0),
        "get_device_properties": HOPPER,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)


def report_of(model, **sections):
    config = load_config({"model": str(model), "cache": {"memory": "16MiB"}, **sections})
    return explain(config, compose(config, Registry.discover(PluginsOptions())))


def readers(report):
    """Weight format -> whose kernels multiply by it."""
    linears = {name: source for name, source in report["ops"].items() if name.startswith("linear[")}
    return {name[len("linear[") : -1]: source for name, source in linears.items()}


def test_parts_are_those_for_gpus_without_a_word_in_the_config(model):
    report = report_of(model)
    assert (report["engine"]["device"], report["engine"]["dtype"]) == ("cuda", "bfloat16")
    chosen = {slot: report["parts"][slot]["key"] for slot in ("attention", "cache")}
    assert chosen == {"attention": "flash", "cache": "paged"}
    assert readers(report) == {"dense": "torch"} and report["ops"]["rms_norm"] == "cuda"


ROW = {"use": "int8", "group": 0}


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        ("int8", {"int8_g32": "cuda"}),
        (ROW, {"int8": "cuda"}),
        (ROW | {"activations": "float"}, {"int8_a16": "cuda"}),
        ("int4", {"int4_g64": "cuda"}),
    ],
)
def test_quantized_weights_are_read_by_the_gpus_kernels_and_int8_rows_come_from_norms(model, quantizer, expected):
    report = report_of(model, quantizer=quantizer)
    assert readers(report) == {"dense": "torch", **expected}
    assert all(facts["pays"] for facts in report["formats"].values())
    assert ("norm_linear[int8]" in report["fused"]) == ("int8" in expected)
    # Of the model's two layers: silu's gate, and of four norms the sum before three, the normed rows behind all.
    saves = {op: facts["saves"] for op, facts in report["fused"].items() if op != "attention_inputs"}
    normed = {"norm_linear[int8]": 4 * 2 * 64 * 2} if "int8" in expected else {}
    assert saves == {"add_rms_norm": 3 * 64 * 2, "silu_mul": 2 * 2 * 128 * 2, **normed}


def test_sparse_weights_are_read_by_the_sparse_tensor_cores_where_these_are_named(model):
    alone = report_of(model, quantizer="sparse24")
    assert readers(alone) == {"dense": "torch", "sparse24": "torch"} and not alone["formats"]["sparse24"]["pays"]
    assert "cusparselt ranks 0" in alone["parts"]["kernels"]["reason"]
    both = report_of(model, quantizer=["sparse24", ROW], kernels=["cusparselt", "cuda"])
    assert readers(both) == {"dense": "torch", "sparse24": "cusparselt", "int8": "cuda"}
    assert (both["ops"]["norm_linear[int8]"], both["ops"]["rms_norm"]) == ("cuda", "cuda")


def test_kernels_of_torch_before_the_gpus_keep_the_chain(model):
    report = report_of(model, quantizer=ROW, kernels=["torch", "cuda"])
    assert not any(name.startswith("norm_linear") for name in report["ops"]) and report["fused"] == {}


def test_mapped_memory_without_a_driver_says_what_is_missing_in_one_sentence(model):
    from intarsia_cuda.driver import unavailable

    if unavailable() is None:
        pytest.skip("there is a driver")
    with pytest.raises(CompositionError) as caught:
        report_of(model, cache={"use": "vmm", "memory": "16MiB"})
    reason = str(caught.value).partition("cannot be used here: ")[2].partition(". What fits: ")[0]
    assert "NVIDIA driver" in reason and ". " not in reason
