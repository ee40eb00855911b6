"""`intarsia bench speculation`: what is measured is what is said. Nothing here asks how fast it is."""

import json

import pytest

from engines import engine_of
from intarsia.cli import run as cli
from intarsia.errors import ExecutionError
from intarsia.types import SamplingParams
from intarsia_bench.speculation import Rival, Run, _measure, rows, run
from intarsia_bench.speculation_work import ALL, MODULES, TOPICS, Ask
from models import tiny_llama

SIZES = {"hidden": 16, "heads": 2, "kv_heads": 1, "layers": 1, "ffn": 16, "max_len": 4096}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("speculation"), **SIZES)[0]


@pytest.mark.parametrize("name", ALL)
def test_no_two_repeats_ask_the_same(name):
    texts = [ask.messages[-1]["content"] for repeat in range(8) for ask in ALL[name](repeat)]
    assert all(len(text) > 10 for text in texts)
    if name != "batch16":
        assert len(set(texts)) == len(texts) == 8
    assert ALL[name](3) == ALL[name](3)
    assert len(set(MODULES)) == len(MODULES) and len(set(TOPICS)) == len(TOPICS)


def test_a_run_counts_tokens_after_the_first_step_and_the_rows_that_brought_them(tiny):
    asks = [
        Ask(({"role": "user", "content": "ab"},), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True))
        for n in (9, 5)
    ]
    with engine_of(tiny) as engine:
        plain = run(engine, asks)
    assert (plain.num_tokens, plain.num_rows, plain.drafted) == (8 + 4, 8 + 4, 0)
    assert [len(answer) for answer in plain.answers] == [9, 5]
    with engine_of(tiny, drafter={"use": "ngram", "adaptive": False}) as engine:
        drafted = run(engine, asks)
    assert drafted.answers == plain.answers
    assert drafted.num_tokens == 12 and drafted.num_rows == 12 - drafted.accepted


def _run(rate, answers=((1,),), **more):
    return Run(seconds=10 / rate, num_tokens=10, num_rows=5, answers=answers, **{"drafted": 0, "accepted": 0} | more)


def test_the_ratio_is_the_median_of_the_repeats_own():
    plain, own = Rival("none", None), Rival("ngram", None)
    plain.runs["edit"] = [_run(10), _run(20), _run(40)]
    own.runs["edit"] = [_run(20, drafted=4, accepted=1), _run(30, ((2,),)), _run(40)]
    first, second = rows([plain, own], ["edit"])
    assert first["ratio"] == 1 and first["acceptance"] is None and first["equal_answers"] == 1
    assert (second["ratio"], second["min_ratio"], second["max_ratio"]) == (1.5, 1.0, 2.0)
    assert second["acceptance"] == 0.25 and second["tokens_per_step"] == 2 and second["equal_answers"] == 0.667


def test_a_drafter_that_changes_answers_is_found(tiny, monkeypatch):
    from intarsia_bench import speculation

    answers = iter([((1,),), ((2,),)])
    monkeypatch.setattr(speculation, "run", lambda engine, asks: _run(10, next(answers)))
    with engine_of(tiny) as engine:
        assert engine.parts.invariance == "bitwise"
        with pytest.raises(ExecutionError, match="edit: with the drafter ngram"):
            _measure([Rival("none", engine), Rival("ngram", engine)], ["edit"], 1, lambda *_: None)


def test_the_command_prints_json(tiny, capsys):
    asked = ["bench", "speculation", "-m", str(tiny), "--workload", "free", "--repeat", "1", "--json"]
    small = ["-o", "cache.memory='64MiB'", "-o", "engine.dtype=float32", "-o", "engine.threads=1"]
    assert cli([*asked, "--drafter", "ngram", *small]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert [(row["workload"], row["drafter"]) for row in measured] == [("free", "none"), ("free", "ngram")]
    assert measured[1]["equal_answers"] == 1
