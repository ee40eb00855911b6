"""Engines that batch in flight over pages, with a real model: in fp32, every answer has the bits of its solo run."""

import itertools
import random

import pytest
import torch

from engines import engine_of
from intarsia import Request, SamplingParams
from intarsia.testing import poison_cache, prompt_logits
from models import tiny_llama

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def pool(num_tokens, page_size):
    return str(-(-num_tokens // page_size) * page_size * TOKEN_BYTES)


def inflight(tiny, *, num_tokens=8192, page_size=16, cache="paged", max_model_len=None, prefix=None, **options):
    section = {"use": cache, "page_size": page_size, "memory": pool(num_tokens, page_size)}
    if prefix is not None:
        section["prefix"] = prefix
    engine = {"max_model_len": max_model_len} if max_model_len else {}
    made = engine_of(tiny[0], engine=engine, cache=section, scheduler={"use": "inflight"} | options)
    assert made.explain()["invariance"]["level"] == "bitwise"
    poison_cache(made)
    return made


def random_prompts(count, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for _ in range(count)]


def alone(tiny, prompts, params):
    """What the naive engine says, one request at a time."""
    with engine_of(tiny[0], scheduler="static", cache={"use": "contiguous", "memory": "64MiB"}) as engine:
        return [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]


def same(one, other):
    """Equal answers: tokens, text, and log-probabilities to the last bit."""
    return [(a.choices, a.prompt_token_ids, a.seed) for a in one] == [
        (a.choices, a.prompt_token_ids, a.seed) for a in other
    ]


def is_idle(engine):
    engine.parts.cache.check_integrity()
    stats = engine.stats()
    return (stats["waiting"], stats["running"], stats["cache"]["used"], engine.has_work) == (0, 0, 0, False)


MIXED = [
    SamplingParams(max_tokens=40, temperature=t, top_p=p, seed=i, ignore_eos=True, logprobs=3)
    for i, (t, p) in enumerate([(0, 1), (1, 1), (0.7, 0.8), (1.3, 0.9), (0, 1), (1, 0.5)])
]


@pytest.mark.parametrize("max_tokens", [5, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 5])
@pytest.mark.parametrize("prefix", [True, False])
def test_preemption_never_shows(tiny, max_tokens, page_size, prefix):
    """Six requests of 20 + 40 tokens in a pool for two and a half of them."""
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    made = inflight(tiny, num_tokens=150, page_size=page_size, max_model_len=64, max_tokens=max_tokens, prefix=prefix)
    with made as engine:
        plans = watch(engine)
        assert same(engine.generate(prompts, MIXED), expected)
        assert sum(len(plan.preempted) for plan in plans) > 0
        assert is_idle(engine)


def watch(engine):
    """Collect the plans of an engine's scheduler."""
    import attrs

    plans, scheduler = [], engine.parts.scheduler

    class Watched:
        def plan(self):
            plans.append(scheduler.plan())
            return plans[-1]

        def __getattr__(self, name):
            return getattr(scheduler, name)

    engine.parts = attrs.evolve(engine.parts, scheduler=Watched())
    return plans


def test_streams_repeat_no_token_under_preemption(tiny):
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny, num_tokens=150, max_model_len=64) as engine:
        plans = watch(engine)
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True)):
            engine.add(Request(request_id=str(i), prompt=prompt, params=params))
        outputs = {str(i): [] for i in range(6)}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert any(plan.preempted for plan in plans)
    for i, completion in enumerate(expected):
        mine = outputs[str(i)]
        assert tuple(t for o in mine for t in o.token_ids) == completion.token_ids
        assert "".join(o.text for o in mine) == completion.text
        assert [o.finish_reason for o in mine if o.finish_reason] == ["length"]
        assert mine[-1].usage.prompt_tokens == 20 and mine[-1].usage.completion_tokens == 40


LENGTHS = (15, 16, 17, 31, 32, 33, 37)


@pytest.fixture(scope="module")
def edges(tiny):
    prompts = [random_prompts(1, n, seed=n)[0] for n in LENGTHS]
    ids = [list(p) for p in prompts]
    with torch.no_grad():
        for _ in range(20):
            for row in ids:
                row.append(int(tiny[1](torch.tensor([row])).logits[0, -1].argmax()))
    return prompts, [tuple(row[len(p) :]) for row, p in zip(ids, prompts, strict=True)]


@pytest.mark.parametrize(("max_tokens", "page_size"), list(itertools.product([1, 7, 16, 36, 37, 38], [1, 16, 64, 128])))
def test_chunks_and_page_edges_equal_transformers(tiny, edges, max_tokens, page_size):
    prompts, expected = edges
    greedy = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with inflight(tiny, page_size=page_size, max_tokens=max_tokens) as engine:
        found = engine.generate(prompts[:3], greedy) + engine.generate(prompts[3:], greedy)
        assert [c.token_ids for c in found] == expected
        with torch.no_grad():
            reference = tiny[1](torch.tensor([prompts[-1]])).logits[0]
        chunked = prompt_logits(engine, prompts[-1], chunk=max_tokens)
        assert (chunked - reference).abs().max() < 1e-4
        assert is_idle(engine)


@pytest.mark.parametrize("order", range(4))
def test_a_seeded_request_says_the_same_in_any_company(tiny, order):
    """Alone, among unseeded ones in another order each time, and with a budget of three tokens."""
    params = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True, logprobs=1)
    noise = SamplingParams(temperature=1, max_tokens=16, ignore_eos=True)
    prompt = list(b"The capital of France is")
    (expected,) = alone(tiny, [prompt], [params])
    others = random_prompts(7, 9, seed=order)
    with inflight(tiny) as engine, inflight(tiny, max_tokens=3) as narrow:
        place = order * 2
        batch = [*others[:place], prompt, *others[place:]]
        settings = [params if i == place else noise for i in range(8)]
        for each in (engine, narrow):
            found = each.generate(batch, settings)[place]
            assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)


# --- prefixes ---------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize("length", [16, 32, 48, 49])
def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_end(tiny, length):
    (prompt,) = random_prompts(1, length)
    with inflight(tiny) as engine:
        cold, warm = engine.generate([prompt], GREEDY) + engine.generate([prompt], GREEDY)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens == (length - 1) // 16 * 16
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
        twice = engine.generate([prompt, prompt], GREEDY)
        assert all(c.logprobs == cold.logprobs for c in twice)
        assert is_idle(engine)


def test_one_of_two_sharers_can_be_cancelled(tiny):
    (prompt,) = random_prompts(1, 48)
    with inflight(tiny) as engine:
        (expected,) = engine.generate([prompt], GREEDY)
        for name in "ab":
            engine.add(Request(request_id=name, prompt=prompt, params=GREEDY))
        outputs = engine.step() + engine.step()
        assert engine.stats()["cache"]["shared"] == 2
        engine.cancel("a")
        while engine.has_work:
            outputs += engine.step()
        assert tuple(t for o in outputs if o.request_id == "b" for t in o.token_ids) == expected.token_ids
        assert is_idle(engine)


def changed(prompt, **edits):
    return [edits.get(f"at_{i}", token) for i, token in enumerate(prompt)]


def test_only_equal_prefixes_under_an_equal_salt_are_shared(tiny):
    (prompt,) = random_prompts(1, 40)
    j = 5
    others = {
        "carried": changed(prompt, at_5=(prompt[j] + 31) % 256, at_6=(prompt[j + 1] - 1) % 256),
        "swapped": changed(prompt, at_5=prompt[j + 1], at_6=prompt[j]),
        "other parent": [(prompt[0] + 1) % 256, *prompt[1:]],
    }
    expected = dict(zip(others, alone(tiny, list(others.values()), [GREEDY] * 3), strict=True))
    with inflight(tiny) as engine:
        engine.generate([prompt], GREEDY)
        for name, other in others.items():
            (found,) = engine.generate([other], GREEDY)
            assert found.usage.cached_tokens == 0, name
            assert found.logprobs == expected[name].logprobs
        assert engine.generate([prompt], GREEDY)[0].usage.cached_tokens == 32
        cached = []
        for i, salt in enumerate(["a", "b", "a"]):
            engine.add(Request(request_id=f"salt-{i}", prompt=prompt, params=GREEDY, cache_salt=salt))
            while engine.has_work:
                cached += [o.usage.cached_tokens for o in engine.step() if o.finish_reason]
        assert cached == [0, 0, 32]


def test_choices_share_their_prompt(tiny):
    (prompt,) = random_prompts(1, 50)
    params = SamplingParams(n=4, seed=3, temperature=1.2, max_tokens=12, ignore_eos=True, logprobs=1)
    (expected,) = alone(tiny, [prompt], [params])
    with inflight(tiny, prefix=False) as engine:
        plans = watch(engine)
        (found,) = engine.generate([prompt], params)
        assert found.choices == expected.choices
        assert sum(plan.num_tokens for plan in plans) == 50 + 3 + 4 * 11
        assert max(len(plan.rows) for plan in plans) == 4
        assert is_idle(engine)


def test_a_fork_needs_few_pages(tiny):
    """Four choices of a prompt of six pages in a pool of thirteen: copies would need 28."""
    (prompt,) = random_prompts(1, 90)
    params = SamplingParams(n=4, seed=3, max_tokens=10, ignore_eos=True)
    (expected,) = alone(tiny, [prompt], [params])
    with inflight(tiny, num_tokens=13 * 16, max_model_len=128, prefix=False) as engine:
        plans = watch(engine)
        assert engine.generate([prompt], params)[0].choices == expected.choices
        assert not any(plan.preempted for plan in plans)


# --- cancelling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_cancelling_at_any_time_leaves_the_others_alone(tiny, steps):
    """Waiting, between chunks, after the last chunk, decoding, preempted."""
    prompts = random_prompts(4, 20, seed=9)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=1)
    expected = alone(tiny, prompts, [params] * 4)
    with inflight(tiny, num_tokens=96, max_model_len=48, max_tokens=16) as engine:
        for i, prompt in enumerate(prompts):
            engine.add(Request(request_id=str(i), prompt=prompt, params=params))
        outputs = [o for _ in range(steps * 4) for o in engine.step()]
        for name in ("2", "2", "nobody"):
            engine.cancel(name)
        after = []
        while engine.has_work:
            after += engine.step()
        assert [o.finish_reason for o in after if o.request_id == "2"] in (["abort"], [])
        assert [o.finish_reason for o in outputs + after if o.request_id == "2" and o.finish_reason] in (
            ["abort"],
            ["length"],
        )
        for i in (0, 1, 3):
            mine = [o for o in outputs + after if o.request_id == str(i)]
            assert tuple(e for o in mine for e in o.logprobs) == expected[i].logprobs
        assert is_idle(engine)


def test_in_flight_batching_works_over_contiguous_regions_too(tiny):
    prompts = random_prompts(5, 20)
    params = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, n=2, logprobs=1, seed=1)] * 5
    expected = alone(tiny, prompts, params)
    with inflight(tiny, cache="contiguous", num_tokens=192, max_model_len=64, max_tokens=9) as engine:
        assert same(engine.generate(prompts, params), expected)
        assert is_idle(engine)


def test_static_batching_works_over_pages_too(tiny):
    prompts = random_prompts(5, 20)
    params = [SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1, seed=1)] * 5
    expected = alone(tiny, prompts, params)
    section = {"use": "paged", "memory": pool(128, 16)}
    with engine_of(
        tiny[0], scheduler={"use": "static", "max_batch": 4}, cache=section, engine={"max_model_len": 64}
    ) as e:
        assert same(e.generate(prompts, params), expected)
        assert is_idle(e)
