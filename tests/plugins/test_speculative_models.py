"""Drafters that run a model: a second one, and the target's own first layers. The output is that of plain decoding."""

import json
import random
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import CompositionError, ConfigError, ModelNotFoundError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import LogitsProcessor, SequenceProcessor
from intarsia.types import Provider
from intarsia_speculative.contract import DraftModelContract, LayerSkipContract
from models import edit_json, tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The target, and a stranger that was trained for fewer tokens."""
    folder = tmp_path_factory.mktemp("models")
    return {"target": tiny_llama(folder)[0], "stranger": tiny_llama(folder, layers=1, seed=9, max_len=48)[0]}


def prompt_of(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


PROMPTS = [prompt_of(length, seed=length) for length in (3, 15, 16, 33, 8, 5)]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=30, temperature=1, seed=1, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=24, temperature=0.7, top_p=0.8, seed=2, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0, presence_penalty=1.5, frequency_penalty=1.0, min_tokens=10),
    SamplingParams(max_tokens=17, temperature=1.3, seed=4, n=3, logit_bias={7: 2.0}, banned_token_ids=(9,)),
    SamplingParams(max_tokens=24, temperature=0, banned_words=("e",), prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def plain(models):
    with engine_of(models["target"]) as engine:
        return engine.generate(PROMPTS, PARAMS)


def told(completions):
    return [(one.choices, one.prompt_logprobs) for one in completions]


def drafter_of(models, name, **options):
    given = {"adaptive": False, "k": 3} | options
    if name == "layer_skip":
        return {"use": "layer_skip", **given}
    return {"use": "draft_model", "model": str(models[name]), "memory": "16MiB", **given}


def used(engine):
    """Pages that sequences hold, in the target's cache and in a second model's."""
    own = engine.stats()["speculation"]["own"]
    return engine.stats()["cache"]["used"], own.get("draft_pages_used", 0)


NAMES = ("target", "stranger", "layer_skip")
LAYOUTS = {
    "in flight": {},
    "static": {"scheduler": "static", "cache": {"use": "contiguous", "memory": "64MiB"}},
    "chunks": {"scheduler": {"use": "inflight", "max_tokens": 7}},
    "crowded": {
        "engine": {"max_model_len": 80},
        "cache": {"page_size": 4, "memory": str(132 * TOKEN_BYTES)},
        "scheduler": {"use": "inflight", "max_tokens": 11},
    },
}


@pytest.mark.parametrize("sections", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_output_is_that_of_plain_decoding_bit_for_bit(models, plain, name, sections):
    with engine_of(models["target"], drafter=drafter_of(models, name), **sections) as engine:
        engine.parts.executor.poison()
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain), "prompts are cached by now"
        engine.parts.cache.check_integrity()
        figures = engine.stats()["speculation"]
        assert figures["failures"] == 0 and figures["drafted"] > 0, figures["last_failure"]
        assert used(engine)[0] == 0


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["target", "layer_skip"])
def test_any_number_of_guesses_leaves_the_output(models, plain, name, k):
    sections = {"cache": {"page_size": 3, "memory": "4MiB"}}
    with engine_of(models["target"], drafter=drafter_of(models, name, k=k), **sections) as engine:
        engine.parts.executor.poison()
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        assert engine.stats()["speculation"]["failures"] == 0


def test_a_model_that_drafts_for_itself_is_always_right_sampled_or_greedy(models, plain):
    """Its logits and numbers are the target's, with penalties, bans and biases at each position."""
    with engine_of(models["target"], drafter=drafter_of(models, "target")) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        figures = engine.stats()["speculation"]
    assert figures["accepted"] == figures["drafted"] > 100


def test_under_rejection_too_a_model_that_drafts_for_itself_is_always_right(models):
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3, ignore_eos=True) for t in (0.7, 1, 1.3)]
    sections = {"engine": {"verify": "rejection"}, "drafter": drafter_of(models, "target")}
    with engine_of(models["target"], **sections) as engine:
        first = engine.generate(PROMPTS[:3], params)
        figures = engine.stats()["speculation"]
        assert figures["accepted"] == figures["drafted"] > 40
        assert told(engine.generate(PROMPTS[:3], params)) == told(first), "equal seeds and drafts"


def test_rejection_accepts_more_of_what_half_agrees(models):
    params = [SamplingParams(max_tokens=40, temperature=1, seed=i, ignore_eos=True) for i in range(6)]
    rates = {}
    for verify in ("equal", "rejection"):
        drafter = drafter_of(models, "layer_skip", layers=3)
        with engine_of(models["target"], drafter=drafter, engine={"verify": verify}) as engine:
            engine.generate(PROMPTS, params)
            figures = engine.stats()["speculation"]
            rates[verify] = figures["accepted"] / figures["drafted"]
    assert rates["rejection"] > rates["equal"] > 0


class Alternates(LogitsProcessor, SequenceProcessor):
    """After an even id only odd ones, and the other way round: what a grammar is like to a drafter."""

    def open(self, params, num_prompt):
        return self

    def process(self, token_ids, logits_V):
        logits_V[token_ids[-1] % 2 :: 2] = -torch.inf


class Alternating:
    @hookimpl
    def provide_logits_processors(self):
        return [Provider(key="alternates", summary="even, odd", build=lambda context: Alternates())]


@pytest.mark.parametrize("name", NAMES)
def test_a_drafting_models_guesses_go_through_logits_processors(models, name):
    sections = {"logits_processors": "alternates", "plugins": [Alternating()]}
    with engine_of(models["target"], **sections) as engine:
        wanted = engine.generate(PROMPTS, PARAMS)
    ids = wanted[0].choices[0].token_ids
    assert all((a - b) % 2 for a, b in pairwise(ids)) and len(ids) == 24
    with engine_of(models["target"], drafter=drafter_of(models, name), **sections) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(wanted)
        figures = engine.stats()["speculation"]
    assert figures["failures"] == 0 and figures["drafted"] > 0, figures["last_failure"]
    if name == "target":
        assert figures["accepted"] == figures["drafted"]


@pytest.mark.parametrize("name", ["target", "layer_skip"])
def test_the_memory_plan_counts_what_a_drafter_takes(models, name):
    with engine_of(models["target"], drafter=drafter_of(models, name)) as engine:
        plan, parts = engine.explain()["memory"], engine.parts
        held = parts.executor._stage._cache.num_bytes
        if name == "target":
            held += parts.weight_bytes + (16 << 20) + parts.layout.page_bytes
    assert plan["drafter"] > 0
    assert plan["cache"] + plan["spare"] + plan["drafter"] == held
    assert plan["total"] == plan["weights"] + plan["cache"] + plan["spare"] + plan["drafter"]


class TestLayerSkipContract(LayerSkipContract):
    pass


class TestDraftModelContract(DraftModelContract):
    pass


@pytest.mark.slow
class TestDraftModelWithControl(DraftModelContract):
    settings: ClassVar = DraftModelContract.settings | {"adaptive": True}
    repeats: ClassVar = False


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A model with windows of 8 on every other layer."""
    import torch

    config = Gemma2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=257, max_position_embeddings=256, sliding_window=8, query_pre_attn_scalar=8,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    path = tmp_path_factory.mktemp("gemma") / "model"
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["layer_skip", "draft_model"])
def test_windows_that_leave_pages_behind_leave_the_output(gemma, name):
    params = [SamplingParams(max_tokens=40, temperature=t, seed=2, ignore_eos=True) for t in (0, 1, 0, 0.7)]
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 9, 40)]
    sections = {"cache": {"page_size": 4, "memory": "2MiB"}}
    drafter = {"use": name, "k": 5, "adaptive": False}
    if name == "draft_model":
        drafter |= {"model": str(gemma), "memory": "2MiB"}
    with engine_of(gemma, **sections) as engine:
        expected = engine.generate(prompts, params)
    with engine_of(gemma, drafter=drafter, **sections) as engine:
        engine.parts.executor.poison()
        assert told(engine.generate(prompts, params)) == told(expected)
        figures = engine.stats()["speculation"]
        assert figures["failures"] == 0 and figures["drafted"] > 50
        engine.parts.cache.check_integrity()


# --- the second model's cache -----------------------------------------------------------------------------------------


def test_a_second_model_without_room_costs_guesses_alone(models, plain):
    """A cache of 64 tokens, for eight sequences."""
    drafter = drafter_of(models, "stranger", memory=str(64 * 2 * 1 * 2 * 16 * 4))
    with engine_of(models["target"], drafter=drafter) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        figures = engine.stats()["speculation"]
        assert figures["failures"] == 0 and figures["own"]["no_room"] > 0 and figures["drafted"] > 0


def test_a_second_model_gives_pages_back_and_stops_with_the_engine(models):
    with engine_of(models["target"], drafter=drafter_of(models, "target")) as engine:
        for i, prompt in enumerate(PROMPTS):
            engine.generate([prompt], PARAMS[:1])
            inner = engine.parts.drafter.inner
            # Executors hear that a sequence left with the next step.
            assert set(inner._held) == {(f"local-{i}", 0)}
            inner.parts.cache.check_integrity()
        inner.forget((f"local-{i}", 0))
        assert used(engine) == (0, 0)
        inner.parts.cache.check_integrity()
    assert inner.parts.executor._stage._runner is None


def test_a_prompt_longer_than_a_catch_up_step_is_taken_in_parts(models, plain, monkeypatch):
    from intarsia_speculative import draft_model

    monkeypatch.setattr(draft_model, "_CATCH_UP", 6)
    with engine_of(models["target"], drafter=drafter_of(models, "target")) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        figures = engine.stats()["speculation"]
    assert figures["own"]["caught_up_tokens"] > 0 and figures["failures"] == 0
    assert figures["accepted"] == figures["drafted"] > 20


def test_a_target_in_fewer_bits_drafts_for_itself(models, plain):
    with engine_of(models["target"], drafter=drafter_of(models, "target", quantizer="int8")) as engine:
        assert engine.parts.drafter.inner.parts.weight_bytes < engine.parts.weight_bytes
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        figures = engine.stats()["speculation"]
    assert figures["failures"] == 0 and figures["accepted"] > figures["drafted"] / 3 > 0


# --- composition ------------------------------------------------------------------------------------------------------


def test_a_second_model_of_another_vocabulary_is_refused_by_both_names(models, tmp_path):
    other = tiny_llama(tmp_path, vocab=300, layers=1)[0]
    small = tiny_llama(tmp_path, vocab=100, layers=1)[0]
    with engine_of(models["target"], drafter=drafter_of({"other": other}, "other")):
        pass  # a padded vocabulary: both have 257 tokens
    with pytest.raises(CompositionError, match=r"has 100 token ids and the target \(llama\) has 257") as caught:
        engine_of(models["target"], drafter=drafter_of({"small": small}, "small"))
    assert caught.value.field == "drafter.model" and str(small) in str(caught.value)


def test_a_second_model_of_other_tokens_is_refused(models, tmp_path):
    other = tiny_llama(tmp_path, layers=1)[0]
    table = json.loads((other / "tokenizer.json").read_text())
    vocab = table["model"]["vocab"]
    first, second = (next(letter for letter, index in vocab.items() if index == number) for number in (40, 41))
    vocab[first], vocab[second] = 41, 40
    (other / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(CompositionError, match="token 40 is") as caught:
        engine_of(models["target"], drafter=drafter_of({"other": other}, "other"))
    assert caught.value.field == "drafter.model"


def test_a_second_model_that_is_not_there_is_named(models):
    with pytest.raises(ConfigError, match=r"drafter\.model: no model is given"):
        engine_of(models["target"], drafter="draft_model")
    with pytest.raises(ModelNotFoundError, match=r"drafter\.model: '\./nowhere' cannot be composed"):
        engine_of(models["target"], drafter={"use": "draft_model", "model": "./nowhere"})


def test_a_second_model_drafts_within_its_own_length(models, plain):
    """The stranger was trained for 48 tokens; some sequences go past that."""
    edit_json(models["stranger"] / "config.json", max_position_embeddings=20)
    try:
        with engine_of(models["target"], drafter=drafter_of(models, "stranger")) as engine:
            assert engine.parts.drafter.inner.parts.engine.max_model_len == 20
            assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
            assert engine.stats()["speculation"]["failures"] == 0
    finally:
        edit_json(models["stranger"] / "config.json", max_position_embeddings=48)


def test_layers_to_skip_must_be_left(models):
    with pytest.raises(CompositionError, match="layers is a number from 1 to 3"):
        engine_of(models["target"], drafter=drafter_of(models, "layer_skip", layers=4))


def test_more_rows_than_scratch_pages_are_drafted_for_in_turn(models, plain, monkeypatch):
    from intarsia_speculative import layer_skip

    monkeypatch.setattr(layer_skip, "_SCRATCH_ROWS", 1)
    sections = {"cache": {"page_size": 1, "memory": "4MiB"}}
    with engine_of(models["target"], drafter=drafter_of(models, "layer_skip"), **sections) as engine:
        assert told(engine.generate(PROMPTS, PARAMS)) == told(plain)
        assert engine.stats()["speculation"]["failures"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("drafter", [{"use": "layer_skip", "layers": 20}, {"use": "draft_model", "model": "smollm2"}])
def test_smollm2_says_what_it_says_without(drafter):
    prompts = ["The capital of France is", "def fibonacci(n):", [1, 9690, 198]]
    params = [SamplingParams(max_tokens=24, temperature=t, seed=7, ignore_eos=True, logprobs=2) for t in (0, 0.8, 1)]
    sections = {"engine": {"max_model_len": 128}, "cache": {"memory": "64MiB"}}
    with engine_of("smollm2", **sections) as engine:
        expected = engine.generate(prompts, params)
    if drafter["use"] == "draft_model":
        drafter = drafter | {"memory": "64MiB"}
    with engine_of("smollm2", drafter=drafter | {"k": 4, "adaptive": False}, **sections) as engine:
        assert told(engine.generate(prompts, params)) == told(expected)
        figures = engine.stats()["speculation"]
    assert figures["failures"] == 0 and figures["drafted"] > 40
    if drafter["use"] == "draft_model":
        assert figures["accepted"] == figures["drafted"]
