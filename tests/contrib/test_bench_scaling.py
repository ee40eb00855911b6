"""The scaling model: its limits, worked out by hand, its traffic against what is counted, and the command."""

import json
from typing import get_args

import pytest
from attrs import evolve

from families import CASES, saved
from intarsia.cli import run
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import CompositionError, ConfigError
from intarsia.plugins import Registry
from intarsia.types import Dtype
from intarsia_bench import scaling_command
from intarsia_bench.hardware import DEVICES, LINKS, Link, loopback
from intarsia_bench.limits import Limits, ModelCost, demand
from intarsia_bench.scaling import Layout, Machine, Scaling, Step, rank_cost, share_out
from models import tiny_llama
from sliced_ranks import SlicedRank

INFINITE = float("inf")
FREE = Link(INFINITE)
#: Computes at a rate, and reads for nothing; reads at a rate, and computes for nothing.
COMPUTING, READING = Limits(1e30, {"float32": 1e9}), Limits(1e9, {"float32": 1e30})
INSTANT = Limits(1e30, {"float32": 1e30})
DECODE, PREFILL = Step(rows=4, seen=50), Step(rows=1, tokens=48)


def composed(path, *overrides):
    base = {"model": str(path), "engine": {"dtype": "float32", "threads": 1}, "cache": {"memory": "32MiB"}}
    plain = ["kernels=torch", "runner=eager", "attention=eager"]
    return compose(load_config(base, [*plain, *overrides]), Registry.discover())


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    # Head and norms are next to nothing beside its layers, and everything divides by 4.
    sizes = {"heads": 4, "kv_heads": 4, "layers": 8, "ffn": 2048, "vocab": 260}
    return composed(tiny_llama(tmp_path_factory.mktemp("model"), **sizes)[0])


def predict(parts, layout, step, limits, link=FREE):
    return Scaling(parts, layout, Machine(limits, link, link)).predict(step)


# --- one rank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("overrides", [(), ("quantizer=int8",), ("cache.format=int8",)], ids=str)
def test_one_rank_takes_what_the_bench_counts_for_the_whole_model(tmp_path, tied, overrides):
    path, _ = tiny_llama(tmp_path, tie=tied)
    parts = composed(path, *overrides)
    partition = share_out(parts, Layout())
    assert rank_cost(parts, partition, partition.shares[0]) == ModelCost.of(parts)


@pytest.mark.parametrize("limits", [COMPUTING, READING, Limits(1e9, {"float32": 1e10})])
def test_one_rank_is_at_the_limit_of_the_bench(parts, limits):
    cost = ModelCost.of(parts)
    prompts = [[row] * 50 for row in range(4)]
    decoding = demand(cost, [(ids, 2) for ids in prompts], without_first=True).seconds(limits, "float32")
    assert predict(parts, Layout(), DECODE, limits).tokens_per_s == pytest.approx(4 / decoding)
    prefilling = demand(cost, [(list(range(48)), 1)], without_first=False).seconds(limits, "float32")
    assert predict(parts, Layout(), PREFILL, limits).tokens_per_s == pytest.approx(48 / prefilling)


def test_a_token_meets_two_matrices_of_an_ungated_block_and_the_chosen_experts_of_a_mixture(tmp_path):
    """transformers' own parameters, counted; of 4 experts a token of the mixture goes to `top_k`."""
    for name in ("gpt2", "mixtral"):
        case = next(case for case in CASES if case.name == name)
        model = saved(case, tmp_path / name)
        parts = composed(tmp_path / name, f"engine.max_model_len={case.max_model_len}")
        matrices = 0
        for weight, tensor in model.named_parameters():
            if tensor.ndim < 2 or "embed" in weight or "wte" in weight or "wpe" in weight or "lm_head" in weight:
                continue
            mlp = parts.spec.layers[0].mlp
            part = mlp.top_k / mlp.num_experts if "experts" in weight else 1
            matrices += tensor.numel() * part
        assert ModelCost.of(parts).token_flops == 2 * matrices, name


# --- several ranks, by hand -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("step", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_with_free_links_n_slices_take_an_nth(parts, tp, step):
    alone, sliced = (predict(parts, Layout(tp=n), step, COMPUTING).seconds for n in (1, tp))
    assert sliced == pytest.approx(alone / tp, rel=1e-6)
    # Norms are read by every rank.
    alone, sliced = (predict(parts, Layout(tp=n), step, READING).seconds for n in (1, tp))
    assert alone / tp < sliced < 1.01 * alone / tp


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_with_free_links_a_pipeline_of_equal_stages_loses_its_bubble(parts, pp, microbatches):
    found = predict(parts, Layout(pp=pp, microbatches=microbatches), DECODE, COMPUTING)
    bubble = (pp - 1) / (microbatches + pp - 1)
    assert found.bubble == pytest.approx(bubble, abs=0.02)
    alone = predict(parts, Layout(), DECODE, COMPUTING)
    assert found.tokens_per_s / alone.tokens_per_s == pytest.approx(pp * (1 - bubble), rel=0.03)


def test_a_microbatch_reads_its_stage_s_weights_again(parts):
    """Decoding is bound by reading: two microbatches of half the rows take about as long each as one of all."""
    one, two = (predict(parts, Layout(pp=2, microbatches=m), DECODE, READING).seconds for m in (1, 2))
    assert two / one == pytest.approx(3 / 2, rel=0.05)


def test_a_ring_is_worked_out_by_hand():
    link = Link(bytes_per_s=10.0, latency_s=1.0, start_s=5.0)
    assert link.ring_s(60, 3, 2) == 5 + 4 * (1 + 20 / 10)
    assert link.ring_s(60, 3, 1) == 5 + 2 * (1 + 20 / 10)
    assert link.ring_s(60, 1, 2) == 0
    assert link.message_s(60) == 5 + 1 + 6


def test_stages_wait_for_a_hand_over_that_takes_longer_than_they_do(parts):
    """Each microbatch of 2 rows is 2 x 64 numbers of 4 bytes: 2 s at 256 bytes a second, and a stage takes nothing."""
    link = Link(bytes_per_s=256.0)
    found = predict(parts, Layout(pp=3, microbatches=2), DECODE, INSTANT, link)
    assert found.seconds == pytest.approx(2 * 2 + (2 - 1) * 2, rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(pp=2, microbatches=2), Layout(2, 2, 2, True)], ids=str)
@pytest.mark.parametrize("step", [DECODE, PREFILL, evolve(DECODE, likeliest=False)], ids=["decode", "prefill", "all"])
def test_better_links_never_make_it_slower(parts, layout, step):
    limits = Limits(1e9, {"float32": 1e10})
    rates = [predict(parts, layout, step, limits, Link(b, 1e-5)).tokens_per_s for b in (1e5, 1e7, 1e9, 1e12)]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    rates = [predict(parts, layout, step, limits, Link(1e9, a, a)).tokens_per_s for a in (1e-2, 1e-4, 1e-6, 0.0)]
    assert rates == sorted(rates) and rates[0] < rates[-1]
    assert rates[-1] <= predict(parts, layout, step, limits).tokens_per_s


# --- what it sends ----------------------------------------------------------------------------------------------------


class Counter:
    """Stands for a process group: does nothing, and counts messages and bytes as a ring would send them."""

    def __init__(self, size):
        self.size, self.messages, self.num_bytes = size, 0, 0

    def _ring(self, tensor, rounds):
        steps = rounds * (self.size - 1)
        self.messages += steps
        self.num_bytes += steps * tensor.numel() * tensor.element_size() / self.size
        return self

    def wait(self):
        return True

    def allreduce(self, tensors):
        return self._ring(tensors[0], 2)

    def alltoall_base(self, out, tensor, *_):
        return self._ring(tensor, 1)

    def allgather(self, out, tensors):
        self.messages += self.size - 1
        self.num_bytes += (self.size - 1) * tensors[0].numel() * tensors[0].element_size()
        return self

    def send(self, tensors, *_):
        self.num_bytes += tensors[0].numel() * tensors[0].element_size()
        return self

    def recv(self, *_):
        self.messages += 1
        return self


@pytest.mark.parametrize("name", ["llama with biases", "olmo2", "phi"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_predicted_traffic_is_what_ranks_ask_of_their_group(tmp_path, name, sequence):
    """Four rows of one token each, with all logits: bytes on the rank that sends most, messages on the one that waits.

    With links that take a second a message and are free otherwise, the prediction counts messages.
    """
    case = next(case for case in CASES if case.name == name)
    saved(case, tmp_path / "model")
    parts = composed(tmp_path / "model", f"engine.max_model_len={case.max_model_len}")
    counted = {}
    for rank in range(2):
        group = Counter(2)
        engine = {"max_model_len": case.max_model_len}
        one = SlicedRank(
            {"model": str(tmp_path / "model"), "engine": engine}, {"tp": 2, "sequence": sequence}, rank, group
        )
        one.run([one.row(str(row), [row, row + 1], 1) for row in range(4)])
        counted[rank] = group
    step = Step(rows=4, seen=1, likeliest=False)
    found = predict(parts, Layout(tp=2, sequence=sequence), step, INSTANT, Link(INFINITE, 1.0))
    assert found.seconds == pytest.approx(counted[0].messages)
    # Norms over all heads work on gathered tokens, whose one number each is rounded down in the formula.
    assert 4 * found.sends == pytest.approx(counted[1].num_bytes, abs=4)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_divide_are_refused_as_the_executor_refuses_them(tmp_path):
    path, _ = tiny_llama(tmp_path, heads=9, kv_heads=3, hidden=288, head_dim=32, ffn=192, layers=3)
    parts = composed(path)
    with pytest.raises(CompositionError, match=r"executor\.tp: 2 does not divide the 9 query heads"):
        predict(parts, Layout(tp=2), DECODE, READING)
    with pytest.raises(CompositionError, match=r"4 stages are more than the model's 3 layers"):
        predict(parts, Layout(pp=4), DECODE, READING)
    grouped = composed(path, "quantizer={use='int8',group=64}")
    with pytest.raises(CompositionError, match=r"columns of layers\.0\.out\.weight.*groups of 64 columns"):
        predict(grouped, Layout(tp=3), DECODE, READING)


def test_more_microbatches_than_a_step_has_rows_are_refused(parts):
    with pytest.raises(ConfigError, match="--microbatches: 5 are more than the 4 rows of a step"):
        predict(parts, Layout(pp=2, microbatches=5), DECODE, READING)


# --- hardware and the command -----------------------------------------------------------------------------------------


def test_named_hardware_is_what_the_command_offers():
    assert tuple(DEVICES) == scaling_command.DEVICE_NAMES
    assert tuple(LINKS) == scaling_command.LINK_NAMES
    dtypes = set(get_args(Dtype)) - {"auto"}
    assert dtypes and all(dtypes == set(limits.flops_per_s) for limits in DEVICES.values())


def test_the_loopback_takes_time():
    found = loopback()
    assert 1e-7 < found.latency_s < 0.1 and 1e6 < found.bytes_per_s < 1e12


def command(model, *more):
    options = ("-o", "engine.dtype=float32", "-o", "engine.threads=1", "-o", "cache.memory=32MiB")
    return run(["bench", "scaling", "-m", str(model), *options, *more])


@pytest.fixture(scope="module")
def nine_heads(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("nine"), heads=9, kv_heads=3, hidden=72, head_dim=8, ffn=192, layers=3)[0]


HARDWARE = ("--bandwidth", "100", "--peak", "1", "--link", "pcie5x16")


def test_the_command_says_what_is_predicted_of_what_and_what_does_not_divide(nine_heads, capsys):
    assert command(nine_heads, *HARDWARE, "--ranks", "3", "--ranks", "2") == 0
    said = capsys.readouterr().out
    assert "predicted, not measured" in said
    assert "tp 3 x pp 1" in said and "tp 1 x pp 2" in said and "tp 2 x pp 1" not in said
    assert "2x1 left out: executor.tp: 2 does not divide the 9 query heads of layer 0" in said
    assert "device: 100 GB/s, 1 TFLOP/s in float32" in said and "63 GB/s, 1 us a message" in said


def test_the_command_s_rows_are_the_model_s(nine_heads, capsys):
    assert command(nine_heads, *HARDWARE, "--layout", "3x2", "--microbatches", "4", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    rows = {(row["workload"], row["tp"], row["pp"]): row for row in said["predicted"]}
    assert len(rows) == 4
    machine = Machine(Limits(100e9, {"float32": 1e12}), LINKS["pcie5x16"], LINKS["pcie5x16"])
    parts = compose(
        load_config({"model": str(nine_heads), "engine": {"dtype": "float32"}, "cache": {"memory": "32MiB"}}),
        Registry.discover(),
    )
    found = Scaling(parts, Layout(3, 2, 4), machine).predict(Step(rows=16, seen=1024))
    assert rows["decode", 3, 2]["tokens_per_s"] == pytest.approx(found.tokens_per_s)
    alone = rows["decode", 1, 1]
    assert alone["speed_up"] == alone["efficiency"] == 1
    assert rows["decode", 3, 2]["efficiency"] == pytest.approx(found.tokens_per_s / alone["tokens_per_s"] / 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--layout", "2by2"), "--layout '2by2' is not TPxPP"),
        (("--layout", "0x2"), "is not TPxPP"),
        (("--layout", "2x1", *HARDWARE), "executor.tp: 2 does not divide the 9 query heads"),
        (("--device", "h100"), "--device h100 needs a --link"),
        (("--link", "string"), "'string' is not one of"),
        (("--bandwidth", "0"), "0"),
        (("--layout", "1x2", "--microbatches", "17", *HARDWARE), "--microbatches: 17 are more than the 16 rows"),
    ],
)
def test_what_cannot_be_predicted_is_said(nine_heads, capsys, options, message):
    assert command(nine_heads, *options) == 2
    assert message in capsys.readouterr().err
