"""`intarsia bench`: workloads, rounds, latencies, compositions and what is printed. Nothing here looks at a clock."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia import Engine, Request, SamplingParams
from intarsia.cli import run
from intarsia.config import load_config
from intarsia.errors import ConfigError
from intarsia_bench import composition
from intarsia_bench.contender import Measurement
from intarsia_bench.latency import Latencies
from intarsia_bench.peers import workloads
from intarsia_bench.profiling import Clock, probes, profile
from intarsia_bench.rounds import Series, run_rounds
from intarsia_bench.trace import Trace
from intarsia_bench.variants import side_by_side, variants, with_memory

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "contrib/intarsia_bench/peers"


def options(model, *more):
    return ["bench", "-m", model, "-o", "engine.dtype=float32", "-o", "engine.threads=1", *more]


# --- workloads --------------------------------------------------------------------------------------------------------


def shapes(name, seed=0):
    return [(len(ids), n) for ids, n in workloads.work(name, seed)]


def test_the_workloads_are_the_documented_ones():
    assert shapes("decode1") == [(128, 65)]
    assert shapes("prefill") == [(2048, 1)]
    assert shapes("decode16") == [(128, 33)] * 16
    assert shapes("prefix") == [(1056, 16)] * 16
    mixed = shapes("mixed")
    assert len(mixed) == 48
    assert min(p for p, _ in mixed) >= 16 and max(p for p, _ in mixed) <= 768
    assert min(n for _, n in mixed) >= 8 and max(n for _, n in mixed) <= 192
    assert len(set(mixed)) > 40
    prompts = [ids for ids, _ in workloads.work("prefix", 0)]
    assert all(ids[:1024] == prompts[0][:1024] for ids in prompts)
    assert len({tuple(ids[1024:]) for ids in prompts}) == 16


def test_the_page_says_what_the_workloads_are():
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)[: len(workloads.ALL)] == list(workloads.ALL)


def test_prompts_are_random_ids_and_new_in_every_repeat():
    for name in workloads.ALL:
        first, again, other = (workloads.work(name, seed) for seed in (0, 0, 1))
        assert first == again != other
        ids = [token for prompt, _ in first for token in prompt]
        assert min(ids) >= 100 and max(ids) <= 40000
    drawn = workloads.work("mixed", 3)
    rng = random.Random("mixed 3")
    prompt = min(768, max(16, int(rng.lognormvariate(5.0, 0.9))))
    output = min(192, max(8, int(rng.lognormvariate(3.8, 0.8))))
    assert drawn[0] == ([rng.randint(100, 40000) for _ in range(prompt)], output)


def test_the_rate_counts_prompt_tokens_in_prefill_and_leaves_first_tokens_out_where_it_says_so():
    counted = {name: workloads.num_counted(name, 0) for name in workloads.ALL}
    mixed = sum(n for _, n in workloads.work("mixed", 0))
    assert counted == {"decode1": 64, "prefill": 2048, "decode16": 512, "mixed": mixed, "prefix": 256}
    assert workloads.num_counted("mixed", 1) != mixed


@pytest.mark.parametrize("name", workloads.ALL)
def test_a_repeat_subtracts_the_same_work_with_one_token_and_fresh_prompts(name, monkeypatch):
    now = 0.0
    seen = []

    def generate(requests):
        nonlocal now
        seen.append(requests)
        now += sum(n for _, n in requests)

    monkeypatch.setattr(workloads.time, "perf_counter", lambda: now)
    seconds = workloads.measure(name, 2, generate)
    assert seen[0] == workloads.work(name, 2)
    total = sum(n for _, n in seen[0])
    if name not in ("decode1", "decode16"):
        assert (len(seen), seconds) == (1, total)
        return
    assert seconds == total - len(seen[0])
    assert [(len(ids), n) for ids, n in seen[1]] == [(128, 1)] * len(seen[0])
    assert not {tuple(ids) for ids, _ in seen[0]} & {tuple(ids) for ids, _ in seen[1]}


# --- rounds -----------------------------------------------------------------------------------------------------------


class Fake:
    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, list(seconds), log

    def measure(self, workload, repeat):
        self.log.append((workload, repeat, self.name))
        return Measurement(self.seconds.pop(0))


def test_contenders_run_in_turn_and_each_workload_is_finished_before_the_next():
    log = []
    a, b = Fake("a", [4.0, 1.0, 2.0, 1, 1, 1], log), Fake("b", [1.0] * 6, log)
    told = []
    series = run_rounds(
        [a, b],
        ["prefill", "prefix"],
        3,
        progress=lambda *facts: told.append(facts),
        before_round=lambda: log.append("machine"),
        settle_s=0,
    )
    expected = []
    for workload in ("prefill", "prefix"):
        for repeat in range(3):
            expected += ["machine", (workload, repeat, "a"), (workload, repeat, "b")]
    assert log == expected
    assert [(one.workload, one.engine) for one in series] == [
        ("prefill", "a"),
        ("prefill", "b"),
        ("prefix", "a"),
        ("prefix", "b"),
    ]
    assert series[0].seconds == [4.0, 1.0, 2.0]
    assert series[0].rates == [512, 2048, 1024]
    assert series[0].tokens_per_s == 1024  # the median
    assert [(done, total) for _, done, total in told] == [(i, 12) for i in range(12)]


def test_each_repeat_of_a_drawn_workload_is_rated_by_its_own_tokens():
    series = Series("a", "mixed", [Measurement(1.0), Measurement(1.0)])
    assert series.rates == [sum(n for _, n in workloads.work("mixed", seed)) for seed in (0, 1)]


# --- latencies --------------------------------------------------------------------------------------------------------


def test_latencies_are_what_their_definitions_say():
    latencies = Latencies.of(10.0, [[(11.0, 1), (11.5, 1), (12.5, 2)], [(14.0, 3)]])
    assert latencies.ttft == (1.0, 4.0)
    assert latencies.itl == (0.5, 0.5, 0.5, 0.0, 0.0)
    assert latencies.e2e == (2.5, 4.0)
    assert len((latencies + latencies).itl) == 10


def test_percentiles_are_interpolated_and_a_figure_without_values_is_left_out():
    figures = Latencies(ttft=(1.0, 2.0, 3.0), e2e=tuple(float(i) for i in range(101))).figures()
    assert figures == {"ttft": {"p50": 2.0, "p99": pytest.approx(2.98)}, "e2e": {"p50": 50.0, "p99": 99.0}}


# --- compositions -----------------------------------------------------------------------------------------------------


def test_each_vs_makes_another_composition_of_all_that_it_names():
    config = load_config({"model": "m", "cache": {"use": "paged", "memory": "64MiB", "prefix": False}})
    found = variants(config, ["scheduler=static; cache=contiguous;engine.threads=1", "quantizer=int8"])
    first, second, third = found.values()
    assert list(found) == [
        "intarsia",
        "intarsia scheduler=static cache=contiguous engine.threads=1",
        "intarsia quantizer=int8",
    ]
    assert first == config
    assert [choice.use for choice in third.quantizer] == ["int8"]
    assert third.cache == config.cache
    assert (second.scheduler.use, second.cache.use, second.engine.threads) == ("static", "contiguous", 1)
    assert second.cache.options == {"memory": "64MiB"}  # what every cache has stays, `prefix` does not
    assert variants(config, []) == {"intarsia": config}


def test_a_vs_that_names_the_memory_has_its_way():
    config = load_config({"model": "m", "cache": {"memory": "64MiB"}})
    second = list(variants(config, ["cache=contiguous; cache.memory=32MiB"]).values())[1]
    assert second.cache.options == {"memory": "32MiB"}


def test_two_compositions_get_caches_of_equal_bytes(model):
    config = load_config({"model": model})
    alone = side_by_side(config, [])["intarsia"]
    first, second = side_by_side(config, ["cache=contiguous"]).values()
    assert alone == config
    assert first.cache.options["memory"] == second.cache.options["memory"] != "auto"
    three = side_by_side(config, ["cache=contiguous", "scheduler=static"]).values()
    assert len({c.cache.options["memory"] for c in three}) == 1
    given = with_memory(config, "64MiB")
    assert [c.cache.options["memory"] for c in side_by_side(given, ["cache=contiguous"]).values()] == ["64MiB"] * 2


def test_a_run_answers_every_request_in_full_and_knows_when_tokens_came(model):
    with Engine.from_config({"model": model, "engine": {"threads": 1}, "cache": {"memory": "64MiB"}}) as engine:
        latencies = composition.run(engine, [([1, 2, 3], 4), ([5], 1)])
        assert engine.stats()["generated_tokens"] == 5
    assert (len(latencies.ttft), len(latencies.itl), len(latencies.e2e)) == (2, 3, 2)
    assert min(latencies.itl) > 0
    assert latencies.ttft[1] == latencies.e2e[1] < latencies.e2e[0]


def test_a_model_that_cannot_run_the_workloads_is_refused_before_they_run():
    with pytest.raises(ConfigError, match=r"token ids 100 to 40000, and this model has 257"):
        composition.check_suits(["decode1"], 257, 4096)
    with pytest.raises(ConfigError, match=r"engine.max_model_len: 2048 is less than the 2049 tokens of .*'prefill'"):
        composition.check_suits(["decode1", "prefill"], 40001, 2048)
    composition.check_suits(["decode1"], 40001, 193)


def test_a_trace_records_steps_while_it_is_told_to(model):
    trace = Trace()
    config = {"model": model, "engine": {"threads": 1}, "cache": {"use": "paged", "memory": "64MiB"}}
    with Engine.from_config(config, plugins={"trace": trace}) as engine:
        composition.run(engine, [([1], 2)])
        trace.start()
        composition.run(engine, [(list(range(20)), 3), ([5], 2)])
        steps = trace.take()
        composition.run(engine, [([1], 2)])
    assert [(step.rows, step.tokens) for step in steps] == [(2, 2), (2, 2), (1, 1)]
    assert [(step.used, step.cached) for step in steps] == [(3, 0), (2, 0), (0, 1)]
    assert [step.at_s for step in steps] == sorted(step.at_s for step in steps)


# --- the profile ------------------------------------------------------------------------------------------------------


def test_a_section_counts_its_own_time_and_not_what_others_inside_of_it_count():
    now = 0.0
    clock = Clock(now=lambda: now)

    def work(seconds):
        nonlocal now
        now += seconds

    inner = clock.timed("text", lambda: work(2.0))

    def both():
        work(1.0)
        inner()
        inner()
        work(0.5)

    clock.timed("engine", both)()
    taken = clock.take()
    assert (taken["engine"], taken["text"], sum(taken.values())) == (1.5, 4.0, 5.5)
    assert sum(clock.take().values()) == 0


def test_a_profile_covers_the_step_and_takes_its_probes_off(model):
    config = {"model": model, "engine": {"threads": 1}, "cache": {"memory": "64MiB"}}
    with Engine.from_config(config) as engine:
        scheduler = type(engine.parts.scheduler)
        before = Engine.step, scheduler.plan
        found = profile(engine, repeats=1)
        assert (Engine.step, scheduler.plan) == before
        assert found.num_steps == 31  # 33 tokens: not the step of the first, nor of the last
        assert all(found.sections[name] > 0 for name in found.sections if name != "text")  # it has no tokenizer
        with pytest.raises(RuntimeError), probes(engine.parts, Clock()):
            assert Engine.step is not before[0]
            raise RuntimeError
        assert (Engine.step, scheduler.plan) == before
        engine.add(Request(request_id="after", prompt=[1], params=SamplingParams(max_tokens=1)))
        assert engine.step()[0].finish_reason == "length"


# --- the command ------------------------------------------------------------------------------------------------------


def test_bench_prints_json_that_names_engines_workloads_rates_and_seconds(model, capsys):
    more = ("--workload", "decode1", "--workload", "prefill", "--repeat", "2", "--vs", "scheduler=static", "--json")
    assert run(options(model, "-o", "cache.memory=64MiB", *more)) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["workload"], row["engine"]) for row in rows] == [
        (workload, engine)
        for workload in ("decode1", "prefill")
        for engine in ("intarsia", "intarsia scheduler=static")
    ]
    for row in rows:
        assert len(row["seconds"]) == 2
        assert row["min_tokens_per_s"] <= row["tokens_per_s"] <= row["max_tokens_per_s"]
        assert row["bound_tokens_per_s"] > 0 and row["read_bytes_per_s"] > 0
        assert row["ttft_s"]["p50"] <= row["ttft_s"]["p99"] <= row["e2e_s"]["p99"]
        assert ("itl_s" in row) == (row["workload"] == "decode1")  # prefill says one token
    assert [row["ratio"] for row in rows[::2]] == [1.0, 1.0]


def test_bench_prints_tables_and_the_definitions(model, capsys):
    assert run(options(model, "-o", "cache.memory=64MiB", "--workload", "decode1", "--repeat", "1")) == 0
    said = capsys.readouterr().out
    for shown in ("tokens/s", "of limit", "TTFT p50", "ITL p99", "GB/s", "end of the step that brought its first"):
        assert shown in said


def test_bench_draws_a_picture(model, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "runs.svg"
    more = ("--workload", "decode1", "--repeat", "1", "--vs", "cache=contiguous", "--plot", str(file))
    assert run(options(model, "-o", "cache.memory=64MiB", *more)) == 0
    picture = file.read_text()
    for label in ("decode1", "tokens generated", "rows a step", "pages", "intarsia cache=contiguous"):
        assert f"<!-- {label} -->" in picture


@pytest.mark.parametrize(
    "more, message",
    [
        (["--plot", "runs.pdf"], "'runs.pdf' ends in neither .png nor .svg"),
        (["--plot", "no/such/runs.png"], "there is no folder 'no/such'"),
        (["--workload", "decode2"], "'decode2' is not one of"),
        (["--capacity", "--profile"], "--capacity and --profile stand alone"),
        (["--profile", "--workload", "mixed"], "--capacity and --profile stand alone"),
        (["--repeat", "0"], "0 is not in the range"),
        (["--vs", " ; "], "--vs: ' ; ' names no part"),
        (["--vs", "scheduler=statik"], "Did you mean 'static'"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(model, more, message, capsys):
    assert run(options(model, "-o", "cache.memory=64MiB", *more)) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_picture_without_matplotlib_names_the_extra(model, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run(options(model, "--plot", "runs.png")) == 2
    assert "pip install 'intarsia[bench]'" in capsys.readouterr().err


def test_bench_is_a_part_and_its_front_module_loads_nothing_heavy(capsys):
    code = "import intarsia_bench, sys; print(sorted({'torch', 'numpy', 'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert run(["--help"]) == 0
    assert "bench" in capsys.readouterr().out
