"""`intarsia bench --swap`: repeats in pairs, verdicts, arrivals. Only the last test looks at a clock."""

import json

import pytest

from intarsia.cli import run
from intarsia.errors import ExecutionError
from intarsia.types import Output
from intarsia_bench import arriving
from intarsia_bench.contender import Measurement
from intarsia_bench.gains import COST, FIGURES, GAIN, SAME, UNKNOWN, Pairs, gains, swaps_scheduler, verdict, verdicts
from intarsia_bench.latency import Latencies


@pytest.mark.parametrize(
    ("ratios", "rate", "time"),
    [
        ([1.2, 1.25, 1.3], GAIN, COST),
        ([0.8, 0.85, 0.75], COST, GAIN),
        ([1.2, 0.99, 1.3], SAME, SAME),  # one repeat says otherwise
        ([1.005, 1.004, 1.006], SAME, SAME),  # steady, and too little
        ([1.02, 1.05, 1.3], SAME, SAME),  # less than half of what it varies by
        ([1.0, 1.0, 1.0], SAME, SAME),
        ([2.0, 2.0], UNKNOWN, UNKNOWN),
    ],
)
def test_a_verdict_wants_all_repeats_to_agree_beyond_their_noise(ratios, rate, time):
    assert verdict(ratios, more_is_better=True) == rate
    assert verdict(ratios, more_is_better=False) == time


def measured(seconds, first, last, tokens=5):
    """Two requests of so many tokens, which come one by one: the first after `first` seconds, the last after `last`."""
    steps = [(first + (last - first) * i / (tokens - 1), 1) for i in range(tokens)]
    return Measurement(seconds, Latencies.of(0.0, [steps, steps]))


def test_gains_are_medians_of_the_ratios_of_repeats_that_ran_in_turn():
    default = [measured(s, 0.1 * s, s) for s in (1.0, 2.0, 4.0)]  # a machine that slows down
    swap = [measured(s / 2, 0.2 * s, s) for s in (1.0, 2.0, 4.0)]
    rows = {row["figure"]: row for row in gains([Pairs("mixed", "x", default, swap, [10, 10, 10])])}
    assert rows.keys() == FIGURES.keys()
    rate = rows["tokens_per_s"]
    assert (rate["default"], rate["swap"], rate["ratio"], rate["verdict"]) == (5.0, 10.0, 2.0, GAIN)
    first = rows["ttft_s"]
    assert (first["default"], first["swap"], first["ratio"], first["verdict"]) == (0.2, 0.4, 2.0, COST)
    each = rows["tpot_s"]
    assert (each["default"], each["ratio"], each["verdict"]) == (0.45, 0.889, GAIN)
    assert rows["e2e_s"]["verdict"] == rows["e2e_p99_s"]["verdict"] == SAME
    (line,) = verdicts(list(rows.values()))
    assert line == "mixed, x: gain tokens/s 2.00x, TPOT 0.89x; cost TTFT 2.00x"


def test_what_a_workload_does_not_have_is_left_out_and_no_difference_is_said():
    alone = [Measurement(1.0, Latencies.of(0.0, [[(0.5, 1)]])) for _ in range(3)]  # answers of a token
    rows = gains([Pairs("prefill", "x", alone, alone, [1, 1, 1])])
    assert {row["figure"] for row in rows} == {"tokens_per_s", "ttft_s", "e2e_s", "e2e_p99_s"}
    assert verdicts(rows) == ["prefill, x: no difference beyond noise"]
    assert verdicts(gains([Pairs("prefill", "x", alone[:1], alone[:1], [1])])) == ["prefill, x: too few repeats"]


def test_the_time_per_output_token_is_a_requests_own_and_counts_tokens_that_share_a_step():
    found = Latencies.of_each([(1.0, [(2.0, 2), (5.0, 1), (8.0, 1)]), (0.0, [(4.0, 1)])])
    assert found.ttft == (1.0, 4.0) and found.e2e == (7.0, 4.0)
    assert found.tpot == (2.0,)  # 6 seconds for the three behind the first
    assert found.itl == (0.0, 3.0, 3.0)
    assert (found + found).tpot == (2.0, 2.0)


# --- arrivals ---------------------------------------------------------------------------------------------------------


def test_arrivals_are_skewed_the_same_for_all_and_new_in_every_repeat():
    made = arriving.skewed(0, 0.5)
    assert made == arriving.skewed(0, 0.5) != arriving.skewed(1, 0.5)
    assert [one.at_s for one in made] == sorted(one.at_s for one in made) and made[0].at_s == 0
    assert made[-1].at_s / len(made) == pytest.approx(0.5, rel=0.3)
    long = [one.num_tokens for one in made if one.num_tokens >= 160]
    assert len(long) == len(made) // 8 == 20 and max(one.num_tokens for one in made if one.num_tokens < 160) <= 16
    faster = arriving.skewed(0, 0.25)
    assert [one.ids for one in faster] == [one.ids for one in made]
    assert [one.at_s for one in faster] == pytest.approx([one.at_s / 2 for one in made])


class Clock:
    """Time that passes only where somebody waits or steps."""

    def __init__(self):
        self.now, self.slept = 100.0, 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


class Slow:
    """An engine that says a token of each request in a step of a second."""

    def __init__(self, clock, says=lambda wanted: wanted):
        self.clock, self.says, self.left, self.began = clock, says, {}, {}

    @property
    def has_work(self):
        return bool(self.left)

    def add(self, request):
        self.began[request.request_id] = self.clock.now
        self.left[request.request_id] = self.says(request.params.max_tokens)

    def step(self):
        self.clock.now += 1.0
        outputs = []
        for name in list(self.left):
            self.left[name] -= 1
            end = None if self.left[name] else "length"
            outputs.append(Output(request_id=name, choice=0, token_ids=(1,), finish_reason=end))
            if end:
                del self.left[name]
        return outputs


def test_requests_are_added_when_their_time_has_come_and_latencies_are_from_that_time(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(arriving, "time", clock)
    engine = Slow(clock)
    arrivals = [arriving.Arrival(0.0, [1], 2), arriving.Arrival(0.5, [1], 1), arriving.Arrival(9.0, [1], 1)]
    found = arriving.answer(engine, arrivals)
    assert {name: at - 100 for name, at in engine.began.items()} == {"bench-0": 0.0, "bench-1": 1.0, "bench-2": 9.0}
    assert found.latencies.ttft == (1.0, 1.5, 1.0) and found.latencies.e2e == (2.0, 1.5, 1.0)
    assert found.seconds == 10.0 and clock.slept == 7.0


def test_an_answer_of_another_length_is_an_error(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(arriving, "time", clock)
    with pytest.raises(ExecutionError, match="bench-0: 1 tokens came, and 3 were asked for"):
        arriving.answer(Slow(clock, says=lambda wanted: 1), [arriving.Arrival(0.0, [1], 3)])


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("swap", "does"),
    [
        ("scheduler=static", True),
        ("drafter=ngram; scheduler = static", True),
        ("scheduler.max_batch=4", True),
        ("cache=contiguous", False),
        ("executor.scheduler=1", False),
    ],
)
def test_only_swaps_of_the_scheduler_are_measured_with_arrivals(swap, does):
    assert swaps_scheduler(swap) == does


@pytest.mark.parametrize(
    "args",
    [
        ("--capacity", "--swap", "scheduler=static"),
        ("--swap", "scheduler=static", "--swap", "scheduler=static"),
        ("--vs", "scheduler=static", "--swap", "scheduler=static"),
        ("--workload", "skewed"),
        ("--workload", "skewed", "--swap", "cache=contiguous"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_loads(args, model, capsys):
    assert run(["bench", "-m", model, *args]) == 2
    assert "--" in capsys.readouterr().err


def test_a_swap_is_measured_beside_the_default_with_limits_and_a_verdict(model, capsys, monkeypatch):
    monkeypatch.setattr(arriving, "NUM_REQUESTS", 8)
    monkeypatch.setattr(arriving.compare, "__kwdefaults__", {"count": 8})
    options = ["-o", "engine.dtype=float32", "-o", "engine.threads=1", "--repeat", "1"]
    asked = ["--workload", "prefix", "--workload", "skewed", "--swap", "scheduler=static", "--vs", "cache=contiguous"]
    assert run(["bench", "-m", model, *options, *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in found["rates"]] == [
        "intarsia",
        "intarsia cache=contiguous",
        "intarsia scheduler=static",
    ]
    assert all("bound_tokens_per_s" in row for row in found["rates"])
    here = [(row["workload"], row["engine"], row["figure"]) for row in found["gains"]]
    assert here == [(name, "intarsia scheduler=static", f) for name in ("prefix", "skewed") for f in FIGURES]
    assert {row["verdict"] for row in found["gains"]} == {UNKNOWN}
    assert run(["bench", "-m", model, *options, "--workload", "skewed", "--swap", "scheduler=static"]) == 0
    out = capsys.readouterr().out
    assert "skewed, intarsia scheduler=static: too few repeats" in out and "TPOT" in out and "GB/s" not in out
