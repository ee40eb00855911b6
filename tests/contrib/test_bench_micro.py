"""`intarsia bench micro`: what is measured is what is said. Nothing here asks how fast it is."""

import json

import pytest
import torch

from intarsia.cli import run
from intarsia_bench.micro import DETOKENIZING, SAMPLING, TARGETS_US, Detokenizing, SamplingSteps, Timing, measure
from smollm import smollm_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return smollm_tokenizer()


@pytest.mark.parametrize("name", SAMPLING)
def test_steps_choose_a_token_for_each_row_and_go_on_from_it(name):
    steps = SamplingSteps(SAMPLING[name], 3, 512)
    assert all(steps.run() > 0 for _ in range(4))
    ids = [steps._sampler.token_ids((f"micro-{index}", 0)) for index in range(3)]
    assert [len(some) for some in ids] == [260] * 3
    assert [row.start for row in steps._rows] == [259] * 3
    assert [row.token_ids[-1] for row in steps._rows] == [some[-1] for some in ids]
    if name == "greedy":
        assert [some[-1] for some in ids] == steps._logits_LV.argmax(-1).tolist()


def test_the_logits_of_a_step_are_those_of_the_one_before():
    steps = SamplingSteps(SAMPLING["everything"], 2, 512)
    before = steps._logits_LV.clone()
    steps.run()
    assert torch.equal(steps._logits_LV, before)


@pytest.mark.parametrize("name", DETOKENIZING)
def test_a_long_text_without_a_stop_string_is_detokenized(tokenizer, name):
    case = Detokenizing(tokenizer, DETOKENIZING[name])
    assert case.run() > 0
    assert len(case.ids) >= 2000
    assert "はめ込んだ" in tokenizer.decode(case.ids[:200])


def test_a_timing_says_its_median_its_target_and_how_far_the_limit_is():
    seconds = (3e-6, 1e-6, 2e-6)
    plain = Timing(name="greedy", unit="step", seconds=seconds, limit_s=0.5e-6).plain()
    assert plain == {
        "name": "greedy",
        "unit": "step",
        "median_us": 2.0,
        "min_us": 1.0,
        "max_us": 3.0,
        "repeats": 3,
        "target_us": 300.0,
        "limit_us": 0.5,
        "times_limit": 4.0,
    }
    assert "limit_us" not in Timing(name="x", unit="token", seconds=seconds).plain()


def test_targets_are_of_what_is_measured():
    assert set(TARGETS_US) <= {*SAMPLING, *DETOKENIZING}


def test_it_runs_on_one_thread_and_gives_the_threads_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = measure(None, 1, num_rows=2, vocab=1024)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [one.name for one in found] == list(SAMPLING)
    assert all(one.limit_s is not None and 0 < one.limit_s < 1e-3 for one in found)


def test_the_command_prints_json_and_a_table(capsys):
    assert run(["bench", "micro", "--repeat", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(SAMPLING)
    assert all(row["times_limit"] > 0 for row in rows)
    assert run(["bench", "micro", "--repeat", "1", "-m", "smollm2"]) == 0
    out = capsys.readouterr().out
    for name in (*SAMPLING, *DETOKENIZING):
        assert f"\n{name}" in out
    assert "us/token" in out and "16 rows of 49152" in out


def test_options_of_the_workloads_do_not_go_with_it(capsys):
    assert run(["bench", "--workload", "decode1", "micro"]) == 2
    assert "--workload" in capsys.readouterr().err
