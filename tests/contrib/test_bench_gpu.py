"""The GPU benchmark's parts at small sizes on a CPU: what they run is right, and their figures follow from sizes."""

import json
import math

import pytest
import torch
from attrs import evolve
from transformers import LlamaConfig, LlamaForCausalLM

from intarsia import Engine, SamplingParams
from intarsia.errors import CheckpointError, ConfigError
from intarsia.testing import prompt_logits
from intarsia_bench.gpu import attention, fused, llama, random_weights, timing, transformers_decode
from intarsia_bench.gpu.setting import Setting
from intarsia_bench.gpu.targets import TARGETS
from intarsia_bench.limits import LayerCost, ModelCost

SMALL = Setting(
    device="cpu",
    dtype="float32",
    attention="eager",
    kernels="torch",
    heads=4,
    kv_heads=2,
    head_dim=16,
    embed_dim=64,
    ffn_dim=96,
    layers=2,
    vocab=300,
    copy_bytes=1 << 16,
    matrix=64,
    prefill_tokens=70,
    decode_rows=3,
    decode_keys=40,
    long_keys=100,
    tokens=40,
    batch=3,
    context=20,
    prompt=5,
    steps=4,
    rounds=2,
    cache_memory="64MiB",
)


def figures_of(part, setting=SMALL):
    figures = []
    part(setting, figures.append)
    json.dumps(figures)
    return {figure["key"]: figure for figure in figures}


def naive(attending, row):
    """Causal attention of one row in float64, a head at a time."""
    setting, batch = attending.setting, attending.batch
    keys, values = (x.double() for x in attending.gathered(row))
    first, last = batch.bounds[row], batch.bounds[row + 1]
    queries = attending.queries[first:last].double()
    out = torch.zeros_like(queries)
    for i in range(last - first):
        seen = batch.starts[row] + i + 1
        for head in range(setting.heads):
            kv_head = head // (setting.heads // setting.kv_heads)
            scores = keys[:seen, kv_head] @ queries[i, head] / math.sqrt(setting.head_dim)
            out[i, head] = scores.softmax(0) @ values[:seen, kv_head]
    return out


@pytest.mark.parametrize("rows", [[(0, 70)], [(39, 1)] * 3, [(7, 9), (0, 1), (33, 2)]])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_rows_attend_to_the_keys_that_are_gathered_for_the_peer(rows, backend):
    attending = attention.Attending.of(evolve(SMALL, attention=backend), rows)
    found = attending.attend()
    for row in range(len(rows)):
        part = found[attending.batch.bounds[row] : attending.batch.bounds[row + 1]]
        torch.testing.assert_close(part.double(), naive(attending, row), rtol=1e-5, atol=1e-5)


def test_pages_lie_scattered():
    attending = attention.Attending.of(SMALL, [(0, 160)])
    (table,) = attending.batch.pages[0]
    assert sorted(table) == list(range(10)) and list(table) != list(range(10))


def test_the_peer_of_prefill_computes_the_same():
    figures = figures_of(attention.prefill)
    assert figures["prefill_difference"]["value"] <= 1e-5
    peak, sdpa = figures["prefill_of_peak"], figures["prefill_vs_sdpa"]
    assert peak["value"] == pytest.approx(peak["measured"] / peak["limit"])
    assert sdpa["value"] == pytest.approx(sdpa["measured"] / sdpa["limit"])


def seconds(**known):
    return lambda works, device, rounds: {name: known[name] for name in works}


def test_prefill_counts_a_multiplication_and_an_addition_a_key_that_a_query_sees(monkeypatch):
    monkeypatch.setattr(attention, "alternated", seconds(ours=2.0, sdpa=3.0, matmul=1.0))
    figures = figures_of(attention.prefill)
    flops = sum(2 * 2 * 4 * 16 * seen for seen in range(1, 71)) / 2.0
    assert figures["prefill_of_peak"]["measured"] == flops
    assert figures["prefill_of_peak"]["limit"] == 2 * 64**3
    assert figures["prefill_vs_sdpa"]["value"] == 1.5


def test_decode_counts_the_bytes_of_keys_and_values_and_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(attention, "alternated", seconds(ours=2.0, copy=1.0))
    figures = figures_of(attention.paged_decode)
    assert figures["paged_decode_of_copy"]["measured"] == 3 * 40 * 2 * 16 * 4 * 2 / 2.0
    assert figures["long_row_of_copy"]["measured"] == 100 * 2 * 16 * 4 * 2 / 2.0
    assert figures["paged_decode_of_copy"]["limit"] == 2 * (1 << 16)


def test_fused_ops_count_what_they_must_read_and_write(monkeypatch):
    monkeypatch.setattr(fused, "alternated", seconds(ours=1.0, copy=1.0, reference=3.0))
    kernels = {op: fused.OPS[op] for op in ("rms_norm", "add_rms_norm", "silu_mul")}
    monkeypatch.setattr(fused, "kernels_of", lambda _: kernels)
    figures = figures_of(fused.fused)
    assert figures["rms_norm_of_copy"]["measured"] == 2 * 40 * 64 * 4
    assert figures["add_rms_norm_of_copy"]["measured"] == 4 * 40 * 64 * 4
    rows = 40 * 64 // (2 * 96)
    assert figures["silu_mul_of_copy"]["measured"] == rows * 3 * 96 * 4
    assert "3.0 times" in figures["silu_mul_of_copy"]["note"]
    assert "value" not in figures["gelu_tanh_mul_of_copy"] and "no kernel" in figures["gelu_tanh_mul_of_copy"]["note"]


def test_fused_ops_run():
    figures = figures_of(fused.fused)
    assert all("no kernel" in figure["note"] or figure["value"] > 0 for figure in figures.values())


@pytest.mark.parametrize(
    ("part", "changes"), [(attention.prefill, {"attention": "no"}), (fused.fused, {"kernels": "no"})]
)
def test_a_part_that_is_not_there_is_named(part, changes):
    with pytest.raises(ConfigError, match="'no'"):
        figures_of(part, evolve(SMALL, **changes))


# --- timing -----------------------------------------------------------------------------------------------------------


def test_competitors_take_turns_in_changing_order_and_the_median_counts(monkeypatch):
    taken = iter([*[1.0] * 3, *[1.0] * 3, 5.0, 6.0, 8.0, 7.0, 9.0, 1.0])
    ran = []

    def sample(work, device, times):
        work()
        return next(taken)

    monkeypatch.setattr(timing, "sample", sample)
    works = {name: lambda name=name: ran.append(name) for name in "ab"}
    # Rounds: a 5, b 6; b 8, a 7; a 9, b 1.
    assert timing.alternated(works, "cpu", 3) == {"a": 7.0, "b": 6.0}
    assert "".join(ran[6:]) == "abbaab"


def test_short_works_are_repeated_within_a_sample(monkeypatch):
    counts = {"fast": 0, "slow": 0}
    took = {"fast": 1e-4, "slow": 1.0}
    asked = []

    def sample(work, device, times):
        asked.append(times)
        return took[work()]

    monkeypatch.setattr(timing, "sample", sample)
    timing.alternated({name: lambda name=name: name for name in counts}, "cpu", 1)
    assert asked[-2:] == [200, 1]


# --- a model of random weights ----------------------------------------------------------------------------------------


def test_random_weights_are_a_llama_that_transformers_computes_alike(tmp_path):
    folder = random_weights.save_config(tmp_path, **llama.sizes(SMALL))
    with llama.open_engine(SMALL, tmp_path, attention="eager") as engine:
        checkpoint = engine.parts.checkpoint
        fields = json.loads((folder / "config.json").read_text())
        model = LlamaForCausalLM(LlamaConfig(**fields, attn_implementation="eager")).eval()
        state = model.state_dict()
        assert state.keys() == checkpoint.tensors.keys()
        with torch.no_grad():
            for name, tensor in checkpoint.tensors.items():
                tensor.read(state[name])
        ids = list(range(17))
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0]
        assert float((prompt_logits(engine, ids) - expected).abs().max()) <= 1e-5


def test_random_matrices_differ_are_of_the_same_spread_and_come_again(tmp_path):
    opened = random_weights.RandomLoader(random_weights.save_config(tmp_path, **llama.sizes(SMALL))).open()
    read = {}
    for name, stored in opened.tensors.items():
        read[name] = torch.empty(stored.shape)
        stored.read(read[name])
    one, other = (read[f"model.layers.{i}.mlp.gate_proj.weight"] for i in (0, 1))
    assert not torch.equal(one, other) and float(one.std()) == pytest.approx(0.02, rel=0.1)
    assert bool((read["model.norm.weight"] == 1).all())
    again = torch.empty_like(one)
    opened.tensors["model.layers.0.mlp.gate_proj.weight"].read(again)
    assert torch.equal(one, again)


def test_a_matrix_longer_than_the_pool_is_filled_to_its_end(monkeypatch):
    monkeypatch.setattr(random_weights, "_POOL", 101)
    out = torch.full((7, 50), torch.nan)
    random_weights._Pool().fill(out, 90)
    assert bool(out.isfinite().all())
    assert torch.equal(out.view(-1)[:101], out.view(-1)[101:202]) and not torch.equal(out[0], out[1])


def test_only_llamas_get_random_weights(tmp_path):
    random_weights.save_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="'gpt2'"):
        random_weights.RandomLoader(tmp_path).open()


def test_eight_billion_parameters_are_counted(tmp_path):
    opened = random_weights.RandomLoader(random_weights.save_config(tmp_path)).open()
    assert sum(math.prod(tensor.shape) for tensor in opened.tensors.values()) == 8_030_261_248


# --- decoding ---------------------------------------------------------------------------------------------------------


def test_a_decode_step_reads_the_weights_once_and_every_rows_keys():
    cost = ModelCost(weight_bytes=1000, token_flops=1, head_flops=1, layers=(LayerCost(4, 8), LayerCost(4, 16)))
    assert llama.bytes_of_a_step(cost, 3, 10.0) == 1000 + 3 * 10 * 24


def test_decoding_times_steps_in_which_every_row_gets_a_token(tmp_path, monkeypatch):
    seen = []
    real = Engine.step

    def step(self):
        outputs = real(self)
        seen.append(sum(len(output.token_ids) for output in outputs))
        return outputs

    monkeypatch.setattr(Engine, "step", step)
    with llama.open_engine(SMALL, tmp_path) as engine:
        found = llama.decode(engine, SMALL, 3, 20)
        assert not engine.has_work
        answers = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert len(answers[0].token_ids) == 2, "the engine still works"
    assert found.seconds > 0 and found.busy is None and found.context == 20 + 6 + 2
    first = next(i for i, count in enumerate(seen) if count)
    assert seen[first + 1 : first + 1 + 6 + 4] == [3] * 10


def test_an_engines_figures_name_its_parts_and_what_could_not_be_composed():
    figures = figures_of(llama.llama)
    assert "scheduler inflight" in figures["parts"]["note"]
    assert figures["decode64_tokens_per_s"]["value"] > 0
    assert figures["decode1_of_bandwidth"]["value"] > 0
    assert "cuda_graph" in figures["graphs_not_composed"]["note"] or "graphs_parts" in figures
    assert "decode64_host_share" not in figures, "a CPU has no device time"


def test_transformers_decodes_with_a_static_cache():
    figures = figures_of(transformers_decode.transformers_decode, evolve(SMALL, steps=3))
    assert figures["transformers_tokens_per_s"]["value"] > 0


def test_the_defaults_are_the_sizes_of_the_targets():
    full = Setting()
    assert (full.head_dim, full.prefill_tokens, full.decode_rows, full.decode_keys) == (128, 16384, 32, 8192)
    assert (full.batch, full.context, full.dtype) == (64, 2048, "bfloat16")
    assert {target.need for target in TARGETS} == {0.6, 1.0, 0.85, 0.8, 2.0, 0.05}


@pytest.mark.parametrize(
    ("intervals", "total"),
    [([], 0), ([(0, 2), (5, 6)], 3), ([(0, 4), (1, 2), (3, 7)], 7), ([(5, 6), (0, 5)], 6), ([(1, 3), (1, 3)], 2)],
)
def test_time_in_which_the_device_is_busy_counts_once(intervals, total):
    assert llama.covered(intervals) == total
