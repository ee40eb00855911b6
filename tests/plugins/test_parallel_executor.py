"""Engines over ranks answer as one process does, whatever their requests ask and whenever they are given up."""

import pytest

from engines import count_preemptions, engine_of
from intarsia import Request, SamplingParams
from intarsia.errors import CompositionError, InvalidRequestError
from models import tiny_llama
from ranks import PARAMS, PROMPTS, answers, children, mixed, near, parallel, said

#: How the same model is shared out: executor's options, and sections.
LAYOUTS = {
    "pp2": ({"pp": 2, "microbatches": 3, "check_every": 1}, {}),
    "pp3_ngram": ({"pp": 3, "microbatches": 2, "check_every": 5}, {"drafter": {"use": "ngram"}}),
    "pp2_cpu": ({"pp": 2, "microbatches": 2}, {"engine": {"max_model_len": 128}}),
    "pp2_one_microbatch": ({"pp": 2, "microbatches": 1}, {}),
    "pp4": ({"pp": 4, "microbatches": 4}, {}),
    "tp2_pp2": ({"tp": 2, "pp": 2, "microbatches": 2, "check_every": 1}, {"drafter": {"use": "ngram"}}),
    "tp2_pp2_sequence": ({"tp": 2, "pp": 2, "sequence": True, "microbatches": 3}, {}),
    "tp2": ({"tp": 2, "check_every": 1}, {}),
}
FAST = ("pp2", "tp2_pp2")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # Its head is the embedding: the last stage has it, too.
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=5, tie=True)[0]


@pytest.fixture(scope="module")
def wanted(model):
    with engine_of(model, **mixed()) as engine:
        return near(answers(engine))


@pytest.fixture(
    scope="module", params=[pytest.param(key, marks=[] if key in FAST else pytest.mark.slow) for key in LAYOUTS]
)
def engine(request, model):
    options, sections = LAYOUTS[request.param]
    before = children()  # of other tests: what compiles grammars stays for the next engine
    with parallel(model, **options, sections=sections) as made:
        yield made
    assert {*children()} <= {*before}, "no rank outlives its engine"


def idle(engine):
    """Whether nothing is left of any request."""
    stats = engine.stats()
    used = stats["cache"]["used"] - stats["cache"]["cached"] if "cached" in stats["cache"] else stats["cache"]["used"]
    return not (stats["running"] or stats["waiting"] or engine.has_work or used > 0)


def test_a_mixed_batch_is_answered_as_by_one_process(engine, wanted):
    preempted = count_preemptions(engine)
    assert answers(engine) == wanted
    assert preempted, "the cache is small enough for preemptions"


def test_and_once_more_from_cached_prefixes(engine, wanted):
    # Twice: how much of the first is still in the cache is a matter of what was evicted.
    once, again = (engine.generate([PROMPTS[0]], [PARAMS[0]])[0] for _ in range(2))
    assert again.usage.cached_tokens > 0
    assert said(once.choices[0]) == wanted[0][0]
    assert said(again.choices[0]) == wanted[0][0]


def test_streams_and_prompt_scores_are_those_of_one_process(engine, model):
    params = SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1)
    outputs = list(engine.stream(PROMPTS[5], params))
    with engine_of(model, **mixed()) as one:
        (reference,) = one.generate([PROMPTS[5]], params)
    scores = [entry for output in outputs for entry in output.prompt_logprobs]
    assert [token for output in outputs for token in output.token_ids] == list(reference.token_ids)
    assert [each.token_id for each in scores] == PROMPTS[5][1:]
    assert [each.logprob for each in scores] == pytest.approx(
        [each.logprob for each in reference.prompt_logprobs[1:]], abs=1e-4
    )


def run_until(engine, request_id, state):
    """Step until a request is in a state, and return whether it came to it."""
    for _ in range(200):
        if state(engine):
            return True
        engine.step()
    return False


@pytest.mark.parametrize("when", ["waiting", "between chunks", "decoding", "finished", "twice", "unknown"])
def test_a_request_can_be_given_up_in_every_state(engine, wanted, when):
    """Case A05 with stages: nothing comes after the end, the neighbour's answer stays, and all memory is free again."""
    given_up = Request(
        request_id="given up", prompt=list(range(100, 140)), params=SamplingParams(max_tokens=30, seed=1)
    )
    neighbour = Request(request_id="neighbour", prompt=PROMPTS[0], params=PARAMS[0])
    engine.add(neighbour)
    engine.add(given_up)
    told = []
    steps = {"waiting": 0, "between chunks": 2, "decoding": 9, "finished": 200, "twice": 5, "unknown": 3}[when]
    for _ in range(steps):
        if engine.has_work:
            told += engine.step()
    for name in {"unknown": ["nobody"], "twice": ["given up", "given up"]}.get(when, ["given up"]):
        engine.cancel(name)
    after = []
    while engine.has_work:
        after += engine.step()
    mine = [output for output in (*told, *after) if output.request_id == "given up"]
    ends = [output.finish_reason for output in mine if output.finish_reason is not None]
    assert ends == (["length"] if when in ("finished", "unknown") else ["abort"])
    if ends == ["abort"]:
        assert all(output.finish_reason for output in after if output.request_id == "given up"), "nothing but its end"
    ids = [token for output in (*told, *after) if output.request_id == "neighbour" for token in output.token_ids]
    assert tuple(ids) == wanted[0][0][0]
    assert idle(engine), engine.stats()


def test_a_request_that_cannot_be_run_changes_nothing(engine, wanted):
    with pytest.raises(InvalidRequestError):
        engine.generate([[1] * 500], SamplingParams(max_tokens=5))
    assert said(engine.generate([PROMPTS[0]], [PARAMS[0]])[0].choices[0]) == wanted[0][0]


def test_every_rank_says_where_its_time_went(engine):
    figures = engine.parts.executor.figures()
    assert len(figures) == len(engine.parts.executor.context.partition.shares)
    assert all(each["busy_s"] > 0 and each["steps"] > 0 for each in figures)
    last = engine.parts.executor.context.partition.shares[-1].stage
    for share, each in zip(engine.parts.executor.context.partition.shares, figures, strict=True):
        assert (each["sent_bytes"] > 0) == (share.stage < last)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_more_stages_than_layers_are_refused_before_anything_starts(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=3)
    before = children()
    with pytest.raises(CompositionError, match=r"executor\.pp: 4 stages are more than the model's 3 layers"):
        parallel(path, pp=4)
    assert children() == before


def test_a_drafter_that_runs_the_target_is_refused_by_name(model):
    before = children()
    with pytest.raises(CompositionError, match="drafter 'layer_skip' runs layers of the target"):
        parallel(model, pp=2, sections={"drafter": {"use": "layer_skip", "layers": 1}})
    assert children() == before


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_smollm2_in_stages_says_what_it_says_in_one_process(stages):
    """Case L02: its head is its embedding, which both ends load; 30 layers do not divide by 4."""
    engine_options = {"max_model_len": 256}
    sections = {"engine": engine_options, "cache": {"memory": "64MiB"}, "scheduler": "inflight"}
    prompts = ["The capital of France is", "Once upon a time, there was a little girl who", "def fibonacci(n):"]
    params = SamplingParams(temperature=0, max_tokens=16)
    with engine_of("smollm2", **sections) as one:
        wanted = [each.token_ids for each in one.generate(prompts, params)]
    with parallel("smollm2", pp=stages, sections=sections) as engine:
        shares = engine.parts.executor.context.partition.shares
        assert [layer for share in shares for layer in share.layers] == list(range(30))
        assert [each.token_ids for each in engine.generate(prompts, params)] == wanted
