"""A GPU check: parts in processes of their own, times that are kept, and a report from made-up figures."""

import json
import sys
import time

import psutil
import pytest

from intarsia.errors import CompositionError
from intarsia_bench.gpu import check as checking
from intarsia_bench.gpu import parts
from intarsia_bench.gpu.__main__ import main
from intarsia_bench.gpu.parts import PARTS, Part, figures_in, run_apart
from intarsia_bench.gpu.report import PartRun, Run, as_json, as_page, write
from intarsia_bench.gpu.targets import TARGETS, with_derived

PART = Part("some", 5.0, "module:function")


def apart(code, tmp_path, *, seconds=20.0, part=PART):
    out = tmp_path / "figures.jsonl"
    return run_apart(part, [sys.executable, "-c", code, str(out)], out, seconds=seconds, cwd=tmp_path)


WRITE = "import json, sys; file = open(sys.argv[1], 'a'); file.write(json.dumps({'key': 'a', 'value': 1}) + '\\n');"


def test_a_part_that_ends_well_leaves_its_figures(tmp_path):
    run, figures = apart(WRITE, tmp_path)
    assert (run.name, run.status, run.message) == ("some", "ok", "")
    assert figures == [{"key": "a", "value": 1}]


def test_a_part_that_fails_keeps_the_figures_that_it_had_and_says_why(tmp_path):
    run, figures = apart(WRITE + "file.flush(); raise ValueError('out of memory')", tmp_path)
    assert run.status == "failed" and "ValueError: out of memory" in run.message
    assert figures == [{"key": "a", "value": 1}]


def test_a_part_that_dies_by_a_signal_has_failed(tmp_path):
    run, figures = apart(WRITE + "file.flush(); import os; os.abort()", tmp_path)
    assert run.status == "failed" and len(figures) == 1


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path):
    code = (
        WRITE + "file.flush(); import subprocess, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        "open('child', 'w').write(str(child.pid)); time.sleep(60)"
    )
    start = time.perf_counter()
    run, figures = apart(code, tmp_path, seconds=3.0)
    assert time.perf_counter() - start < 15
    assert run.status == "out of time" and figures == [{"key": "a", "value": 1}]
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_part_that_will_not_end_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_GRACE_S", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    start = time.perf_counter()
    run, _ = apart(code, tmp_path, seconds=2.0)
    assert run.status == "out of time" and time.perf_counter() - start < 15


def test_kernels_run_on_the_device_and_not_in_the_interpreter(tmp_path):
    run, _ = apart("import os; assert os.environ['TRITON_INTERPRET'] == '0'", tmp_path)
    assert run.status == "ok", run.message


def test_a_figure_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "figures"
    path.write_text('{"key": "a", "value": 1}\n[1]\n{"value": 2}\n{"key": "b", "val')
    assert figures_in(path) == [{"key": "a", "value": 1}]
    assert figures_in(tmp_path / "none") == []


def test_tests_that_fail_are_counted_and_named(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.mark.parametrize('x', ['a b'])\ndef test_skipped(x): pytest.skip('why')\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "test_it.py"]
    run, _ = run_apart(Part("tests", 60), command, tmp_path / "none", seconds=60, cwd=tmp_path)
    assert run.status == "failed"
    assert run.message == "1 passed, 1 failed, 1 skipped: test_it.py::test_bad"


def test_tests_that_cannot_be_collected_say_why(tmp_path):
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "test_it.py"]
    run, _ = run_apart(Part("tests", 60), command, tmp_path / "none", seconds=60, cwd=tmp_path)
    assert run.status == "failed" and "no_such_module" in run.message


def test_all_parts_together_take_less_than_eight_minutes():
    assert checking.BUDGET_S + 20 <= 8 * 60, "twenty seconds are for the environment"
    assert sum(part.budget_s for part in PARTS) <= checking.BUDGET_S
    assert {target.part for target in TARGETS} <= {part.name for part in PARTS}
    assert PARTS[0].name == "tests", "correctness first"


@pytest.mark.parametrize("part", [part for part in PARTS if part.where], ids=lambda part: part.name)
def test_every_part_is_there(part):
    assert callable(parts._loaded(part.where))


# --- a whole check ----------------------------------------------------------------------------------------------------


MACHINE = {"card": "NVIDIA Made-Up (sm_90)", "torch": "2.11.0", "triton": "3.6.0"}


def run_check(tmp_path, monkeypatch, codes, **facts):
    """Check with parts that run given code; a number is a budget of their own."""
    made = [Part(f"part{i}", budget, "m:f") for i, (budget, _) in enumerate(codes)]
    texts = {part.name: code for part, (_, code) in zip(made, codes, strict=True)}
    monkeypatch.setattr(
        checking, "command_of", lambda part, tests, out: [sys.executable, "-c", texts[part.name], str(out)]
    )
    said = []
    options = {"command": "make gpu-check", "parts": made, "machine": lambda: MACHINE, "say": said.append} | facts
    (tmp_path / "tests").mkdir()
    return checking.check(tmp_path / "tests", tmp_path / "out", **options), said


def test_one_part_that_fails_and_one_that_hangs_take_no_other_with_them(tmp_path, monkeypatch):
    codes = [(20, "raise SystemExit(3)"), (2, "import time; time.sleep(60)"), (20, WRITE)]
    run, said = run_check(tmp_path, monkeypatch, codes)
    assert [part.status for part in run.parts] == ["failed", "out of time", "ok"]
    assert run.figures == ({"key": "a", "value": 1},)
    written = json.loads((tmp_path / "out/gpu.json").read_text())
    assert [part["status"] for part in written["parts"]] == ["failed", "out of time", "ok"]
    assert any("part1: out of time" in line for line in said)


def test_what_no_time_is_left_for_is_not_run_and_says_so(tmp_path, monkeypatch):
    codes = [(20, "import time; time.sleep(2)"), (20, WRITE)]
    run, _ = run_check(tmp_path, monkeypatch, codes, budget_s=11.0)
    assert [(part.status, part.message) for part in run.parts] == [("ok", ""), ("not run", "no time was left")]


def test_a_report_is_there_after_every_part(tmp_path, monkeypatch):
    """The second part looks at what the first has left."""
    report = tmp_path / "out/gpu.md"
    look = f"import pathlib, sys; text = pathlib.Path({str(report)!r}).read_text(); assert 'part1 | not run' in text"
    run, _ = run_check(tmp_path, monkeypatch, [(20, WRITE), (20, look)])
    assert [part.status for part in run.parts] == ["ok", "ok"], run.parts


def test_without_a_gpu_the_check_is_refused_before_anything_runs(tmp_path, capsys):
    with pytest.raises(CompositionError, match=r"^no CUDA device: "):
        checking.check(tmp_path, tmp_path / "out", command="make gpu-check")
    assert main(["check", "--tests", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("no CUDA device: ")
    assert not (tmp_path / "out").exists()


# --- the report -------------------------------------------------------------------------------------------------------


FIGURES = (
    {"key": "prefill_of_peak", "value": 0.5, "measured": 400e12, "limit": 800e12, "unit": "FLOP/s"},
    {"key": "prefill_vs_sdpa", "value": 1.25, "measured": 400e12, "limit": 320e12, "unit": "FLOP/s"},
    {"key": "paged_decode_of_copy", "value": 0.9, "measured": 3600e9, "limit": 4000e9, "unit": "B/s"},
    {"key": "decode1_of_bandwidth", "value": 0.7, "measured": 2800e9, "limit": 4000e9, "unit": "B/s"},
    {"key": "graphs_decode1_of_bandwidth", "value": 0.82, "measured": 3280e9, "limit": 4000e9, "unit": "B/s"},
    {"key": "decode64_host_share", "value": 0.3, "measured": 0.004, "unit": "s"},
    {"key": "graphs_decode64_host_share", "value": 0.03, "measured": 0.0004, "unit": "s"},
    {"key": "decode64_tokens_per_s", "value": 2000.0, "unit": "tokens/s"},
    {"key": "graphs_decode64_tokens_per_s", "value": 3000.0, "unit": "tokens/s"},
    {"key": "transformers_tokens_per_s", "value": 1000.0, "unit": "tokens/s", "note": "compiled"},
    {"key": "gelu_tanh_mul_of_copy", "note": "cuda has no kernel for it"},
    {"key": "long_row_of_copy", "value": 0.8, "measured": 3200e9, "limit": 4000e9, "unit": "B/s"},
)
RUN = Run(
    machine=MACHINE,
    command="make gpu-check",
    date="2026-11-30T12:00:00+00:00",
    parts=(PartRun("tests", "ok", 90.0, "80 passed"), PartRun("fused", "failed", 3.0, "a | b\nValueError: no")),
    figures=FIGURES,
)


def row(text, run=RUN):
    (found,) = [line for line in as_page(run).splitlines() if line.startswith(f"| {text}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_a_target_has_what_was_reached_beside_the_limit_and_the_distance():
    assert row("prefill attention")[1:] == ["at least 60.0%", "50.0% (missed)", "400 TFLOP/s", "800 TFLOP/s", "2.00x"]
    assert row("the same, beside")[1:] == ["at least 1.00x", "1.25x (met)", "400 TFLOP/s", "320 TFLOP/s", "0.80x"]
    assert row("paged decode")[1:] == ["at least 85.0%", "90.0% (met)", "3600 GB/s", "4000 GB/s", "1.11x"]


def test_the_better_of_our_two_ways_counts():
    assert row("8B bf16 decode, batch 1")[2:4] == ["82.0% (met)", "3280 GB/s"]
    assert row("8B bf16 decode, batch 64")[1:] == [
        "at least 2.00x",
        "3.00x (met)",
        "3000 tokens/s",
        "1000 tokens/s",
        "0.33x",
    ]
    assert row("graphs: the host")[1:4] == ["at most 5.0%", "3.0% (met)", "0.4 ms"]


def test_what_nothing_measured_says_so_and_why():
    assert row("RMS norm")[2] == "not measured (fused: failed)"
    assert row("GeLU x up")[2] == "not measured (cuda has no kernel for it)"
    empty = Run(machine=MACHINE, command="c", date="d", parts=(), figures=())
    page = as_page(empty)
    assert page.count("not measured") == len(TARGETS)
    assert [target["reached"] for target in as_json(empty)["targets"]] == [None] * len(TARGETS)


def test_the_table_says_where_and_how_and_is_not_broken_by_what_parts_say():
    page = as_page(RUN)
    assert "NVIDIA Made-Up (sm_90)" in page and "triton 3.6.0" in page and "2026-11-30T12:00:00" in page
    assert "`make gpu-check`" in page
    assert "| fused | failed | 3 | a / b ValueError: no |" in page
    assert "| long_row_of_copy |" in page
    for line in page.splitlines():
        if line.startswith("|"):
            assert line.endswith("|")


def test_the_json_has_every_target_and_figure(tmp_path):
    data, page = write(RUN, tmp_path / "new")
    found = json.loads(data.read_text())
    assert page.read_text() == as_page(RUN)
    assert found["machine"] == MACHINE and found["version"] == 1
    by_key = {target["key"]: target for target in found["targets"]}
    assert set(by_key) == {target.key for target in TARGETS}
    assert (by_key["prefill_of_peak"]["met"], by_key["paged_decode_of_copy"]["met"]) == (False, True)
    assert by_key["host_share"] == {**by_key["host_share"], "reached": 0.03, "met": True}
    assert by_key["rms_norm_of_copy"]["met"] is None
    assert {figure["key"] for figure in found["figures"]} >= {figure["key"] for figure in FIGURES}


def test_nothing_follows_from_figures_that_are_missing():
    kept = [figure for figure in FIGURES if "transformers" not in figure["key"]]
    assert "decode64_vs_transformers" not in {figure["key"] for figure in with_derived(kept)}
    assert with_derived(()) == []
