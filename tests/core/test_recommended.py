"""What a model's files recommend for sampling: applied where a request does not say, shown, and left out on demand."""

import json

import pytest

from engines import CACHE, engine_of
from intarsia import SamplingParams
from intarsia.cli import run
from intarsia.compose import compose
from intarsia.config import as_dict, load_config
from intarsia.errors import CheckpointError, ConfigError
from intarsia.plugins import Registry
from intarsia.types import PluginsOptions, SamplingDefaults
from models import edit_json, tiny_llama

PLAIN = SamplingDefaults()


@pytest.fixture
def model(tmp_path):
    return tiny_llama(tmp_path, layers=1, hidden=32, ffn=32)[0]


def recommend(model, **values):
    edit_json(model / "generation_config.json", **values)
    return model


def parts_of(model, **more):
    config = load_config({"model": {"use": str(model), **more}, "engine": {"threads": 1}, "cache": CACHE})
    return compose(config, Registry.discover(PluginsOptions(allow=())))


@pytest.mark.parametrize(
    ("values", "defaults"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.05, "do_sample": True}, ...),
        ({"temperature": None, "top_k": None, "do_sample": None}, {}),
        ({"temperature": 1, "max_new_tokens": 7, "num_beams": 4}, {"temperature": 1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
        ),
    ],
)
def test_the_files_recommendations_are_the_defaults(model, values, defaults):
    if defaults is ...:
        defaults = {name: value for name, value in values.items() if name != "do_sample"}
    parts = parts_of(recommend(model, **values))
    assert parts.sampling == SamplingDefaults(**defaults)
    assert parts_of(model, generation_config=False).sampling == PLAIN


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 2),
        ("min_p", []),
        ("typical_p", {}),
        ("repetition_penalty", 0),
        ("do_sample", "no"),
        ("do_sample", 0),
    ],
)
def test_a_recommendation_out_of_range_is_refused_by_file_and_field(model, name, value):
    recommend(model, **{name: value})
    with pytest.raises(CheckpointError) as caught:
        parts_of(model)
    message = str(caught.value)
    assert all(word in message for word in ("generation_config.json", f"{name}: ", repr(value)[:10])), message
    assert "model.generation_config = false" in message and caught.value.field == name
    assert parts_of(model, generation_config=False).sampling == PLAIN


def test_a_request_that_says_is_not_changed_and_one_that_does_not_takes_them(model):
    ask = {"max_tokens": 12, "ignore_eos": True, "seed": 3}
    said = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, typical_p=1, repetition_penalty=1, **ask)
    with engine_of(model) as engine:
        drawn = engine.generate([[1, 2]], said)[0].token_ids
        greedy = engine.generate([[1, 2]], SamplingParams(temperature=0, repetition_penalty=1.4, **ask))[0].token_ids
    recommend(model, do_sample=False, repetition_penalty=1.4)
    with engine_of(model) as engine:
        assert engine.generate([[1, 2]], said)[0].token_ids == drawn
        assert engine.generate([[1, 2]], SamplingParams(**ask))[0].token_ids == greedy != drawn
        assert engine.generate([[1, 2]], SamplingParams(temperature=None, **ask))[0].token_ids == greedy


def test_explain_says_the_defaults_and_which_are_the_models(model):
    recommend(model, temperature=0.6, top_p=0.9)
    with engine_of(model) as engine:
        report = engine.explain()
    assert report["sampling"] == {
        "temperature": 0.6,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "recommended": ["temperature", "top_p"],
    }
    recommend(model, temperature=0.7)
    with engine_of(model) as engine:
        assert engine.explain()["hash"] != report["hash"]


def test_the_config_option_is_a_flag_and_comes_back(model):
    assert load_config({"model": {"use": "x", "generation_config": False}}).model.generation_config is False
    config = load_config({"model": "x"}, ["model.generation_config=false"])
    assert load_config(as_dict(config)) == config and as_dict(config)["model"]["generation_config"] is False
    with pytest.raises(ConfigError, match=r"model.generation_config: 'no' is not true or false"):
        load_config({"model": {"use": "x", "generation_config": "no"}})


# --- the command line -------------------------------------------------------------------------------------------------


def asked(model, monkeypatch, capsys, *args):
    """Return the parameters that a command hands to the engine."""
    from intarsia.engine import Engine

    found = []
    stream = Engine.stream
    monkeypatch.setattr(
        Engine, "stream", lambda self, prompt, params: found.append(params) or stream(self, prompt, params)
    )
    code = run([args[0], "-m", str(model), "-o", "cache.memory=8MiB", "--max-tokens", "1", *args[1:]])
    assert code == 0, capsys.readouterr().err
    return found[0]


def test_a_command_passes_on_what_was_given_and_no_more(model, monkeypatch, capsys):
    assert asked(model, monkeypatch, capsys, "generate", "Hi") == SamplingParams(max_tokens=1)
    given = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8, "repetition_penalty": 1.1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "min_tokens": 1, "seed": 4,
    }  # fmt: skip
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    texts = ["--stop", "a", "--stop", "b", "--banned-word", "c"]
    params = asked(model, monkeypatch, capsys, "generate", *flags, *texts, "-n", "2", "Hi")
    assert params == SamplingParams(max_tokens=1, n=2, stop=("a", "b"), banned_words=("c",), **given)


@pytest.mark.parametrize(
    ("values", "flags", "temperature"),
    [
        ({}, [], 0.7),
        ({"top_p": 0.9}, [], 0.7),
        ({"temperature": 1.0}, [], None),
        ({"do_sample": False}, [], None),
        ({"temperature": 0.6}, ["--temperature", "0.1"], 0.1),
        ({}, ["--temperature", "0.1"], 0.1),
    ],
)
def test_a_chat_has_a_temperature_of_its_own_only_where_nobody_says_one(
    model, monkeypatch, capsys, values, flags, temperature
):
    import io
    import sys

    recommend(model, **values)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert asked(model, monkeypatch, capsys, "chat", *flags).temperature == temperature


def test_a_prompt_is_scored_at_the_command_line(model, capsys):
    flags = ["-m", str(model), "-o", "cache.memory=8MiB", "--max-tokens", "0", "--prompt-logprobs", "1"]
    assert run(["generate", *flags, "--json", "Hi!"]) == 0
    answer = json.loads(capsys.readouterr().out)
    first, *others = answer["prompt_logprobs"]
    assert first is None and [entry["token_id"] for entry in others] == answer["prompt_token_ids"][1:]
    assert answer["token_ids"] == [] and answer["finish_reason"] == "length"
    assert run(["generate", *flags, "Hi!"]) == 2
    assert "--prompt-logprobs is shown with --json" in capsys.readouterr().err
