"""Ranks that share a model, with everything else that an engine can be asked for at once, against one process."""

import pytest

from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.errors import CompositionError, ConfigError, InvalidRequestError
from models import TOKENIZER_SIZE, tiny_llama
from ranks import ENGINE, PARAMS, PROMPTS, SCHEDULER, answers, is_gone, near, parallel, pids, said
from structured import KEY, PERSON, ask, loads

PAGED = {"use": "paged", "page_size": 8, "memory": "8MiB"}
SECTIONS = {"engine": ENGINE, "scheduler": SCHEDULER, "cache": PAGED, "logits_processors": KEY}
INT8 = {"attention": "eager", "cache": PAGED | {"format": "int8"}}
NGRAM = {"drafter": {"use": "ngram", "adaptive": False}}

#: How the model is shared out, and what differs in both engines.
COMBINATIONS = {
    "tp2 int8 cache and drafts": ({"tp": 2, "check_every": 1}, INT8 | NGRAM),
    "tp2 sequence": ({"tp": 2, "sequence": True}, NGRAM),
    "pp2 int8 cache and drafts": ({"pp": 2, "microbatches": 3, "check_every": 1}, INT8 | NGRAM),
    "pp3 suffix drafts": ({"pp": 3, "microbatches": 3}, {"drafter": "suffix"}),
    "tp2_pp2 int8 cache": ({"tp": 2, "pp": 2, "sequence": True, "microbatches": 3}, INT8 | NGRAM),
    "tp2 contiguous": ({"tp": 2}, {"cache": {"use": "contiguous", "memory": "8MiB"}, "scheduler": "static"}),
    "pp2 contiguous": ({"pp": 2}, {"cache": {"use": "contiguous", "memory": "8MiB"}, "scheduler": "static"}),
    "tp2 int8 weights": ({"tp": 2}, {"quantizer": {"use": "int8", "group": 32, "activations": "float"}}),
    "tp2_pp2 sparse weights": ({"tp": 2, "pp": 2}, {"quantizer": "sparse24"} | NGRAM),
}
FAST = ("tp2 int8 cache and drafts", "pp2 int8 cache and drafts")
#: An int8 entry that is rounded the other way moves what follows by more than float32 does.
TOLERANCE = {"int8 cache": 2e-2}

STRUCTURES = (
    ask("json_schema", PERSON, temperature=0, max_tokens=60),
    ask("regex", "(red|green|blue)+", temperature=1.0, seed=3, n=3, max_tokens=12, logprobs=2),
    ask("choice", ["one", "two", "three"], temperature=0.7, seed=9, max_tokens=10),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its vocabulary is padded, and its head is the embedding."""
    path = tmp_path_factory.mktemp("model")
    return tiny_llama(path, layers=5, heads=4, kv_heads=2, vocab=TOKENIZER_SIZE + 63, tie=True)[0]


def everything(engine):
    """Ask for all at once, and then again what prefixes are known of."""
    mixed = answers(engine, [*PROMPTS, *(["Say: "] * len(STRUCTURES))], [*PARAMS, *STRUCTURES])
    return [*mixed, *answers(engine, [PROMPTS[0], PROMPTS[3]], [PARAMS[0], PARAMS[3]])]


def approximately(answered, tolerance):
    return [[(ids, why, pytest.approx(found, abs=tolerance)) for ids, why, found in each] for each in answered]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in COMBINATIONS]
)
def test_all_at_once_is_answered_as_by_one_process(model, name):
    layout, differs = COMBINATIONS[name]
    with engine_of(model, **SECTIONS | differs) as one:
        wanted = everything(one)
    with parallel(model, **layout, sections=SECTIONS | differs) as engine:
        ranks, found = pids(engine), everything(engine)
        text = engine.generate(["Say: "], [STRUCTURES[0]])[0].choices[0]
        assert text.finish_reason == "length" or loads(text.text).keys() == {"name", "count"}
    tolerance = next((size for part, size in TOLERANCE.items() if part in name), 1e-4)
    assert found == approximately(wanted, tolerance)
    assert all(map(is_gone, ranks.values())), "no rank outlives its engine"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gemma3_text", "gpt2", "qwen3_moe in every second layer", "mixtral with windows", "olmo2 with biases"]
)
def test_awkward_families_are_answered_over_slices_and_stages_as_by_one_process(tmp_path, name):
    case = next(case for case in CASES if case.name == name)
    saved(case, tmp_path / "model")
    sections = {"engine": ENGINE | {"max_model_len": case.max_model_len}, "cache": PAGED, "scheduler": SCHEDULER}
    with engine_of(tmp_path / "model", **sections) as one:
        wanted = near(answers(one))
    layout = {"tp": 2, "pp": 2, "sequence": True, "microbatches": 2}
    with parallel(tmp_path / "model", **layout, sections=sections) as engine:
        assert answers(engine) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_second_model_drafts_whole_on_the_rank_that_chooses(model, layout):
    sections = SECTIONS | {"drafter": {"use": "draft_model", "model": str(model), "adaptive": False}}
    with engine_of(model, **sections) as one:
        wanted = near(answers(one))
    with parallel(model, **layout, sections=sections) as engine:
        assert answers(engine) == wanted
        assert engine.stats()["speculation"]["accepted"] > 0


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_what_one_request_asks_in_vain_is_refused_and_leaves_the_others_alone(model, layout):
    with parallel(model, **layout, sections=SECTIONS) as engine:
        plain = SamplingParams(temperature=0, max_tokens=6)
        wanted = said(engine.generate([PROMPTS[0]], [plain])[0].choices[0])
        for kind, value in (("regex", "(("), ("json_schema", {"type": "nonsense"}), ("nothing", 1)):
            try:
                (refused,) = engine.generate(["Say: "], [ask(kind, value, max_tokens=4)])
            except InvalidRequestError:
                continue
            assert refused.choices[0].finish_reason == "error", kind
        assert said(engine.generate([PROMPTS[0]], [plain])[0].choices[0]) == wanted


# --- what is refused --------------------------------------------------------------------------------------------------


def test_tokens_sharded_between_no_slices_are_refused(model):
    with pytest.raises(CompositionError, match=r"executor\.sequence: tokens are sharded.*executor\.tp = 1 makes one"):
        parallel(model, pp=2, sequence=True)


@pytest.mark.parametrize("name", ["timeout_s", "start_timeout_s", "step_timeout_s"])
@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 0, -1])
def test_times_that_no_clock_takes_are_refused(model, name, seconds):
    with pytest.raises(ConfigError, match=rf"executor\.{name}"):
        parallel(model, **{"pp": 2, name: seconds})


@pytest.mark.parametrize("said", ["two", "", "-1"])
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"])
def test_an_environment_that_torchrun_never_leaves_is_refused_by_name(model, monkeypatch, name, said):
    for known, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", name: said}.items():
        monkeypatch.setenv(known, value)
    with pytest.raises(ConfigError, match=rf"{name}: the environment has '{said}'"):
        parallel(model, pp=2)


def test_a_launcher_of_one_process_leaves_ranks_to_the_engine(model, monkeypatch):
    """Some set torchrun's variables for a job of one process, too."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with parallel(model, pp=2, microbatches=10**9) as engine:
        assert engine.parts.partition.peers == 2, "the ranks share this machine"
        # Nor are there more microbatches than tokens.
        assert len(engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))[0].token_ids) == 4
