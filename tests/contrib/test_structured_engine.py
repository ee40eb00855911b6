"""Structured output through an engine: ends, limits, padding, drafts and neighbours."""

import json

import jsonschema
import pytest
import regex

from engines import engine_of
from intarsia.cli import run
from intarsia.errors import CompositionError, ConfigError, InvalidRequestError
from intarsia.testing import scripted
from intarsia.types import Request, SamplingParams
from models import TOKENIZER_SIZE, edit_json, tiny_llama
from structured import EOS, KEY, PERSON, TEXT_EOS, ask, byte_tokenizer, loads

PROMPT = "Say: "
NUM_PROMPT = len(PROMPT)
SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "layers": 2, "ffn": 32}
FREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random model whose vocabulary is padded, and which has two ends, one of them a text."""
    path, _ = tiny_llama(tmp_path_factory.mktemp("structured"), vocab=TOKENIZER_SIZE + 63, **SIZES)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, TEXT_EOS]}))
    return path


def structured_engine(model, **sections):
    options = {"use": KEY} | sections.pop("options", {})
    return engine_of(model, logits_processors=[options], plugins=[scripted], **sections)


@pytest.fixture(scope="module")
def engine(model):
    with structured_engine(model) as engine:
        yield engine


def choices(engine, params, prompt=PROMPT):
    (completion,) = engine.generate([prompt], params)
    assert not any(choice.error for choice in completion.choices)
    return completion.choices


@pytest.mark.parametrize(
    ("option", "answers"), [("regex=(red|green)", ["red", "green"]), ('choice=["1", "2"]', ["1", "2"])]
)
def test_the_command_line_asks_for_a_structure_in_json_or_plain_text(model, capsys, option, answers):
    config = ["-m", str(model), "-o", f"logits_processors={KEY}", "-o", "cache.memory=8MiB"]
    assert run(["generate", *config, "--logits-processor", f"{KEY}.{option}", "--max-tokens", "9", PROMPT]) == 0
    assert capsys.readouterr().out.removesuffix("\n") in answers


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_random_model_says_what_the_schema_says(engine, temperature):
    answers = choices(engine, ask("json_schema", PERSON, n=24, seed=1, temperature=temperature, max_tokens=200))
    assert {choice.finish_reason for choice in answers} == {"stop"}
    for choice in answers:
        jsonschema.validate(loads(choice.text), PERSON)
    assert len({choice.text for choice in answers}) > 12


def test_only_max_tokens_leaves_json_open(engine):
    answers = choices(engine, ask("json_schema", FREE, n=16, seed=5, temperature=1.5, max_tokens=150))
    for choice in answers:
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            jsonschema.validate(loads(choice.text), FREE)
    (cut,) = choices(engine, ask("json_schema", FREE, seed=5, max_tokens=3))
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3


@pytest.mark.parametrize("schema", [PERSON, {"enum": ["a", "ab", "abc"]}], ids=["person", "shared prefixes"])
def test_min_tokens_does_not_keep_a_complete_structure_from_ending(engine, schema):
    params = ask("json_schema", schema, n=8, seed=2, temperature=1.0, min_tokens=64, max_tokens=200)
    for choice in choices(engine, params):
        assert choice.finish_reason == "stop"
        jsonschema.validate(loads(choice.text), schema)


def test_min_tokens_holds_where_the_structure_can_go_on(engine):
    for choice in choices(engine, ask("regex", "[ab]*", n=8, seed=3, min_tokens=20, max_tokens=90)):
        assert set(choice.text) <= {"a", "b"}
        assert choice.finish_reason == "length" or len(choice.text) >= 20


@pytest.mark.parametrize("end", [EOS, TEXT_EOS])
def test_a_model_biased_to_end_does_not_end_early_and_either_end_ends(engine, end):
    params = ask("json_schema", PERSON, n=4, seed=4, logit_bias={end: 500.0}, max_tokens=200, include_stop=False)
    for choice in choices(engine, params):
        assert choice.finish_reason == "stop" and choice.token_ids[-1] == end
        jsonschema.validate(loads(choice.text), PERSON)


@pytest.mark.parametrize("most", [0, 8])
def test_a_model_biased_to_whitespace_still_ends(model, most):
    tokenizer = byte_tokenizer()
    bias = {one: 500.0 for one in range(EOS) if tokenizer.token_bytes(one) in (b" ", b"\n", b"\t", b"\r")}
    with structured_engine(model, options={"max_whitespace": most}) as engine:
        for choice in choices(engine, ask("json_schema", PERSON, n=4, seed=6, logit_bias=bias, max_tokens=300)):
            assert choice.finish_reason == "stop"
            jsonschema.validate(loads(choice.text), PERSON)
            outside = regex.sub(r'"[^"]*"', '""', choice.text)
            assert max(map(len, regex.findall(r"\s*", outside))) == most


def test_enums_beyond_ascii_come_whole(engine):
    texts = ["é", "ê", "日本", "😀", "😁"]
    answers = choices(engine, ask("json_schema", {"enum": texts}, n=24, seed=7, temperature=2.0, max_tokens=40))
    assert {loads(choice.text) for choice in answers} <= set(texts)
    assert len({choice.text for choice in answers}) > 1


def test_drafts_change_nothing(model, engine):
    params = ask("json_schema", PERSON, seed=8, temperature=1.5, max_tokens=200)
    (plain,) = choices(engine, params)
    assert plain.finish_reason == "stop"
    ids = list(plain.token_ids)
    # True guesses, and among them what the grammar forbids, ends, and others that it allows.
    for guesses in (ids, [EOS, *ids[1:]], [one if i % 3 else (one + 7) % 250 for i, one in enumerate(ids)], [5] * 40):
        drafter = {"use": "scripted", "ids": guesses, "prompt_tokens": NUM_PROMPT, "k": 4}
        with structured_engine(model, drafter=drafter) as drafting:
            assert choices(drafting, params)[0] == plain


def test_what_cannot_be_compiled_fails_alone(engine):
    with pytest.raises(InvalidRequestError, match="regex"):
        engine.generate([PROMPT], ask("regex", "(a"))
    with pytest.raises(InvalidRequestError, match="exactly one"):
        engine.add(Request(request_id="none", prompt=PROMPT, params=SamplingParams(logits_processors={KEY: {}})))
    engine.add(Request(request_id="bad", prompt=PROMPT, params=ask("regex", "(b")))
    engine.add(Request(request_id="good", prompt=PROMPT, params=ask("regex", "b", max_tokens=5)))
    last = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason:
                last[output.request_id] = output
    assert last["bad"].finish_reason == "error" and "regex" in last["bad"].error
    assert last["good"].finish_reason == "stop"


def test_an_unknown_option_of_the_config_is_named(model):
    with pytest.raises(ConfigError, match="max_schema_bytes"):
        structured_engine(model, options={"max_schema_byte": 3})
    with pytest.raises(ConfigError, match="cache_size"):
        structured_engine(model, options={"cache_size": 0})


def test_a_model_without_an_end_is_refused_by_name(model, tmp_path):
    path, _ = tiny_llama(tmp_path, vocab=TOKENIZER_SIZE, **SIZES)
    edit_json(path / "config.json", eos_token_id=None)
    (path / "generation_config.json").unlink(missing_ok=True)
    edit_json(path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(CompositionError, match="end-of-sequence"):
        structured_engine(path)
