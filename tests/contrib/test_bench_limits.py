"""What bounds a workload, against numbers worked out by hand."""

import pytest
from attrs import evolve

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.plugins import Registry
from intarsia_bench.limits import Demand, LayerCost, Limits, Meter, ModelCost, bound, demand
from intarsia_bench.peers import workloads
from models import tiny_llama

COST = ModelCost(weight_bytes=1000, token_flops=100, head_flops=30, layers=(LayerCost(flops=4, num_bytes=8),))


def ids(n, first=0):
    return list(range(first, first + n))


def test_one_answer_reads_all_weights_and_its_keys_in_every_step():
    # A prompt of 3, then two tokens more; the last one is chosen and not run.
    found = demand(COST, [(ids(3), 3)], without_first=False)
    prompt = 3 * 100 + (1 + 2 + 3) * 4 + 30
    decode = 2 * (100 + 30) + (4 + 5) * 4
    assert found == Demand(num_bytes=1000 + 2 * 1000 + (3 + 4) * 8, flops=prompt + decode)


def test_without_first_tokens_the_prompt_is_left_out():
    found = demand(COST, [(ids(3), 3)], without_first=True)
    assert found == Demand(num_bytes=2 * 1000 + (3 + 4) * 8, flops=2 * (100 + 30) + (4 + 5) * 4)


def test_a_batch_reads_the_weights_once_a_step_as_often_as_its_longest_answer_needs():
    found = demand(COST, [(ids(2), 2), (ids(4, 100), 4)], without_first=True)
    assert found.num_bytes == 3 * 1000 + 8 * (2 + 4 + 5 + 6)
    assert found.flops == 4 * (100 + 30) + 4 * (3 + 5 + 6 + 7)


def test_a_prefix_that_all_share_is_computed_once_and_read_once_a_step():
    found = demand(COST, [([7, 7, 1], 2), ([7, 7, 2], 2)], without_first=False)
    prompts = 2 * 100 + (1 + 2) * 4 + 2 * (100 + 3 * 4 + 30)
    assert found.flops == prompts + 2 * (100 + 30 + 4 * 4)
    assert found.num_bytes == 1000 + 1000 + 2 * 8 + 2 * 1 * 8


def test_a_window_limits_the_keys_that_are_read():
    cost = evolve(COST, layers=(LayerCost(flops=4, num_bytes=8, window=2),))
    found = demand(cost, [(ids(3), 3)], without_first=False)
    assert found.num_bytes == 3 * 1000 + (2 + 2) * 8
    assert found.flops == 3 * 100 + (1 + 2 + 2) * 4 + 30 + 2 * (100 + 30) + (2 + 2) * 4


def test_time_is_bounded_by_the_slower_of_reading_and_computing():
    limits = Limits(bytes_per_s=10.0, flops_per_s={"float32": 4.0, "bfloat16": 8.0})
    assert Demand(num_bytes=100, flops=20).seconds(limits, "float32") == 10.0
    assert Demand(num_bytes=100, flops=80).seconds(limits, "float32") == 20.0
    assert Demand(num_bytes=100, flops=80).seconds(limits, "bfloat16") == 10.0


def test_the_bound_of_decode1_is_bandwidth_over_the_bytes_of_a_step():
    limits = Limits(1e6, {"float32": 1e12})
    seconds = (64 * 1000 + 8 * sum(range(128, 192))) / 1e6
    assert bound(COST, "decode1", 3, limits, "float32") == pytest.approx(64 / seconds)


def test_the_bound_of_prefill_is_the_peak_over_the_operations_of_a_token():
    limits = Limits(1e12, {"float32": 1e6})
    flops = 2048 * 100 + 4 * 2048 * 2049 // 2 + 30
    assert bound(COST, "prefill", 1, limits, "float32") == pytest.approx(2048 / (flops / 1e6))


def test_the_bound_of_mixed_is_the_median_over_the_repeats():
    limits = Limits(1e9, {"float32": 1e7})
    alone = [
        workloads.num_counted("mixed", seed)
        / demand(COST, workloads.work("mixed", seed), without_first=False).seconds(limits, "float32")
        for seed in range(3)
    ]
    assert len(set(alone)) == 3
    assert bound(COST, "mixed", 3, limits, "float32") == sorted(alone)[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_models_cost_is_counted_from_its_weights(tied, tmp_path):
    sizes = {"hidden": 32, "heads": 4, "kv_heads": 2, "layers": 3, "ffn": 48, "vocab": 300}
    path, model = tiny_llama(tmp_path, tie=tied, **sizes)
    config = load_config({"model": str(path), "engine": {"dtype": "float32"}, "cache": {"memory": "64MiB"}})
    cost = ModelCost.of(compose(config, Registry.discover()))
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name)
    everything = sum(p.numel() for p in model.parameters())
    embedding = 300 * 32
    assert cost.token_flops == 2 * matrices
    assert cost.head_flops == 2 * embedding
    assert cost.weight_bytes == 4 * (everything if tied else everything - embedding)
    assert cost.layers == (LayerCost(flops=3 * 4 * 32, num_bytes=3 * 2 * 2 * 8 * 4),)


def test_an_embedding_beside_a_head_of_its_own_is_not_read_by_a_step(tmp_path):
    """int8 quantizes a copy of the tied embedding as the head, and leaves the embedding as it is."""
    path, model = tiny_llama(tmp_path, tie=True, hidden=64, heads=4, kv_heads=2, layers=2, ffn=96, vocab=300)
    base = {"model": str(path), "engine": {"dtype": "float32"}, "cache": {"memory": "64MiB"}}
    whole = ModelCost.of(compose(load_config(base, ["kernels=torch"]), Registry.discover()))
    parts = compose(load_config(base, ["kernels=torch", "quantizer=int8"]), Registry.discover())
    num_bytes = sum(p.numel() * (1 if p.ndim == 2 else 4) for p in model.parameters())
    cost = ModelCost.of(parts)
    assert parts.weight_bytes - cost.weight_bytes == 4 * 300 * 64
    assert num_bytes < cost.weight_bytes < num_bytes * 1.2  # and scales
    assert whole.weight_bytes == 4 * sum(p.numel() for p in model.parameters())


def test_the_meter_keeps_the_best_that_it_saw():
    meter = Meter(("float32", "bfloat16"), buffer_bytes=1 << 20, size=64)
    meter.sample()
    first = meter.limits
    meter.sample()
    assert meter.limits.bytes_per_s >= first.bytes_per_s > 0
    assert all(meter.limits.flops_per_s[name] >= flops > 0 for name, flops in first.flops_per_s.items())
    assert set(first.flops_per_s) == {"float32", "bfloat16"}
