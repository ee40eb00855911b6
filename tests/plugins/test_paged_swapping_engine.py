"""Engines that swap preempted sequences to host memory: every answer has the bits of its solo run, and less is run."""

import random

import pytest

from engines import engine_of
from intarsia import Request, SamplingParams
from intarsia.cli import run as run_command
from intarsia.errors import CompositionError
from intarsia.testing import poison_cache
from models import tiny_llama
from ranks import parallel
from virtual_memory import vmm_plugin

TOKEN_BYTES = 2 * 4 * 2 * 16 * 4  # of the tiny model: keys and values, layers, kv heads, head dim, fp32
#: kernels of plugins have tests of their own, and take long to compile
PLAIN = {"plugins": {"block": ["cpu"]}}
#: for all that is preempted, or for little of it
ROOMY, TIGHT = "1MiB", str(5 * 16 * TOKEN_BYTES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))[0]


def cache(swap, *, num_tokens=160, page_size=16, **options):
    memory = str(num_tokens // page_size * page_size * TOKEN_BYTES)
    return {"use": "paged", "page_size": page_size, "memory": memory, "swap": swap, "swap_when": "always", **options}


def inflight(model, swap=ROOMY, *, max_tokens=64, max_model_len=64, poisons=True, **options):
    sections = {name: options.pop(name) for name in ("drafter", "executor") if name in options}
    made = engine_of(
        model,
        engine={"max_model_len": max_model_len} | PLAIN,
        cache=cache(swap, **options),
        scheduler={"use": "inflight", "max_tokens": max_tokens},
        **sections,
    )
    if poisons:
        poison_cache(made)
    return made


MIXED = [
    SamplingParams(max_tokens=40, temperature=0, seed=7, ignore_eos=True, logprobs=3, repetition_penalty=1.3),
    SamplingParams(max_tokens=40, temperature=1, seed=1, ignore_eos=True, logprobs=3),
    SamplingParams(max_tokens=40, temperature=0.7, top_p=0.8, seed=2, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(max_tokens=40, temperature=1.3, seed=3, ignore_eos=True, logprobs=1, presence_penalty=1.0),
    SamplingParams(max_tokens=40, temperature=0, seed=7, ignore_eos=True, logprobs=3, frequency_penalty=0.5),
    SamplingParams(max_tokens=40, temperature=1, top_p=0.5, seed=5, ignore_eos=True, logprobs=3),
]


def random_prompts(count, length, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for _ in range(count)]


def alone(model, prompts, params, **sections):
    options = {"engine": PLAIN, "scheduler": "static", "cache": {"use": "contiguous", "memory": "64MiB"}} | sections
    with engine_of(model, **options) as engine:
        return [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]


def said(completions):
    return [(c.choices, c.prompt_token_ids, c.seed, c.prompt_logprobs, c.usage.completion_tokens) for c in completions]


def is_idle(engine):
    engine.parts.cache.check_integrity()
    stats = engine.stats()
    swap = stats["preemption"]["swap"]
    books = (stats["waiting"], stats["running"], stats["cache"]["used"], swap["used"], swap["swapped"])
    return books == (0,) * 5 and not engine.has_work


@pytest.mark.parametrize("max_tokens", [7, 64])
@pytest.mark.parametrize("page_size", [1, 16, 5])
@pytest.mark.parametrize("prefix", [True, False])
def test_swapping_never_shows(tiny, max_tokens, page_size, prefix):
    """Six requests of 20 + 40 tokens in a pool for two and a half of them."""
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny, max_tokens=max_tokens, page_size=page_size, num_tokens=150, prefix=prefix) as engine:
        assert engine.explain()["invariance"]["level"] == "bitwise"
        assert said(engine.generate(prompts, MIXED)) == said(expected)
        figures = engine.stats()["preemption"]
        assert figures["swap"]["outs"] == figures["swap"]["ins"] == figures["preempted"] > 0
        assert figures["recomputed_tokens"] == 0
        assert is_idle(engine)


def test_fewer_tokens_are_computed_again_the_more_host_memory_there_is(tiny):
    prompts = random_prompts(6, 20)
    expected, recomputed = said(alone(tiny, prompts, MIXED)), []
    for swap in ("0", TIGHT, ROOMY):
        with inflight(tiny, swap, prefix=False) as engine:
            assert said(engine.generate(prompts, MIXED)) == expected
            figures = engine.stats()["preemption"]
            assert figures["preempted"] > 0
            recomputed.append(figures["recomputed_tokens"])
            if swap == TIGHT:
                assert figures["swap"]["no_room"] > 0 and figures["swap"]["outs"] > 0 and is_idle(engine)
    assert recomputed[0] > recomputed[1] > recomputed[2] == 0


def test_streams_repeat_no_token(tiny):
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny) as engine:
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True)):
            engine.add(Request(request_id=str(i), prompt=prompt, params=params))
        outputs = {str(i): [] for i in range(6)}
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert engine.stats()["preemption"]["swap"]["ins"] > 0
    for i, completion in enumerate(expected):
        mine = outputs[str(i)]
        assert tuple(t for o in mine for t in o.token_ids) == completion.token_ids
        assert "".join(o.text for o in mine) == completion.text
        assert tuple(e for o in mine for e in o.logprobs) == completion.logprobs
        assert mine[-1].usage.prompt_tokens == 20 and mine[-1].usage.completion_tokens == 40


def test_entries_in_int8_are_swapped_with_their_scales(tiny):
    prompts = random_prompts(6, 20)
    memory = {"use": "contiguous", "memory": "64MiB", "format": "int8"}
    expected = alone(tiny, prompts, MIXED, cache=memory)
    # An entry takes less here: fewer pages hold as many bytes.
    with inflight(tiny, num_tokens=48, format="int8") as engine:
        assert engine.parts.num_pages < 12
        assert said(engine.generate(prompts, MIXED)) == said(expected)
        assert engine.stats()["preemption"]["swap"]["ins"] > 0 and is_idle(engine)


def test_choices_of_a_request_are_swapped_like_any_other(tiny):
    (prompt,) = random_prompts(1, 30)
    params = SamplingParams(n=4, seed=3, temperature=1.2, max_tokens=30, ignore_eos=True, logprobs=1)
    expected = alone(tiny, [prompt], [params])
    for prefix in (True, False):
        with inflight(tiny, num_tokens=128, prefix=prefix) as engine:
            (found,) = engine.generate([prompt], params)
            assert found.choices == expected[0].choices
            assert engine.stats()["preemption"]["swap"]["ins"] > 0 and is_idle(engine)


def test_speculation_and_swapping_go_together(tiny):
    prompts = [[7, 8, 9, 10] * 5, *random_prompts(5, 20)]
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny, drafter={"use": "ngram", "adaptive": False}) as engine:
        assert said(engine.generate(prompts, MIXED)) == said(expected)
        stats = engine.stats()
        assert stats["preemption"]["swap"]["ins"] > 0 and stats["speculation"]["drafted"] > 0 and is_idle(engine)


def test_two_steps_in_flight_and_swapping_go_together(tiny):
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny, executor={"use": "local", "depth": 2}) as engine:
        assert engine.explain()["steps"]["in_flight"] == 2
        assert said(engine.generate(prompts, MIXED)) == said(expected)
        figures = engine.stats()["preemption"]
        assert figures["swap"]["ins"] > 0 and figures["recomputed_tokens"] == 0 and is_idle(engine)


@pytest.mark.parametrize("steps", [4, 9, 14, 19, 24])
def test_cancelling_at_any_time_leaves_the_others_alone_and_host_memory_free(tiny, steps):
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny) as engine:
        for i, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True)):
            engine.add(Request(request_id=str(i), prompt=prompt, params=params))
        outputs = [o for _ in range(steps) for o in engine.step()]
        waiting = [entry.sequence.sequence_id[0] for entry in engine.parts.scheduler._waiting if entry.swapped]
        gone = waiting[0] if waiting else "2"
        engine.cancel(gone)
        engine.parts.cache.check_integrity()
        while engine.has_work:
            outputs += engine.step()
        for i in set(range(6)) - {int(gone)}:
            mine = [o for o in outputs if o.request_id == str(i)]
            assert tuple(t for o in mine for t in o.token_ids) == expected[i].token_ids
        assert is_idle(engine)


def test_freed_pages_are_never_read_on_the_device_or_the_host(tiny):
    """All that nobody refers to is NaN before each step, but for what the step's moves name."""
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    with inflight(tiny, prefix=False) as engine:
        storage, books = engine.parts.executor._stage._cache, engine.parts.cache
        move, poisoned = storage.move, []

        def poisoning(moves):
            spared = {(m.kind == "swap_in", m.group, m.source) for m in moves}
            for on_host, pools, groups in (
                (False, books._pools, storage.host.device),
                (True, books._host._pools, storage.host.host),
            ):
                for group, (pool, tensors) in enumerate(zip(pools, groups, strict=True)):
                    for page in pool._free:
                        if (on_host, group, page) not in spared:
                            poisoned.append(on_host)
                            for tensor in tensors:
                                tensor[page] = -1  # every bit: NaN as a float
            move(moves)

        engine.parts.executor._stage._cache = Watched(storage, poisoning)
        assert said(engine.generate(prompts, MIXED)) == said(expected)
        assert set(poisoned) == {True, False} and engine.stats()["preemption"]["swap"]["ins"] > 0


class Watched:
    def __init__(self, inner, move):
        self.inner, self.move = inner, move

    def __getattr__(self, name):
        return getattr(self.inner, name)


# --- costs ------------------------------------------------------------------------------------------------------------


def test_costs_are_measured_and_told_with_the_books(tiny):
    with inflight(tiny) as engine:
        figures = engine.stats()["preemption"]
        assert figures["token_s"] is None and figures["swap"]["bytes_per_s"] is None
        assert figures["swap"]["prices"] == {"bytes_per_s": 4e9, "token_s": 1e-4}
        engine.generate(random_prompts(6, 20), MIXED)
        figures = engine.stats()["preemption"]
        assert 0 < figures["token_s"] < 1 and 0 < figures["swap"]["bytes_per_s"] < 1e12
        assert figures["swap"]["prices"] == {
            k: figures[k] if k in figures else figures["swap"][k] for k in ("bytes_per_s", "token_s")
        }
        assert engine.parts.cache._host.prices.token_s == figures["token_s"]
    with inflight(tiny, "0") as engine:
        engine.generate(random_prompts(6, 20), MIXED)
        figures = engine.stats()["preemption"]
        assert figures["swap"] is None and figures["recomputed_tokens"] > 0


# --- composition ------------------------------------------------------------------------------------------------------


def test_the_memory_plan_says_what_host_memory_holds(tiny, capsys):
    with inflight(tiny, poisons=False) as engine:
        plan = engine.explain()["memory"]
        assert plan["host_pages"] == (1 << 20) // (16 * TOKEN_BYTES) and plan["host"] == 1 << 20
        storage = engine.parts.executor._stage._cache
        assert sum(t.numel() * t.element_size() for group in storage.host.host for t in group) == plan["host"]
        assert sum(buffer.memory.numel() for buffer in storage.host._buffers) == plan["staging"]
        assert plan["total"] == plan["weights"] + plan["cache"] + plan["spare"] + plan["staging"]
    arguments = [
        "explain",
        "-o",
        f"model={tiny}",
        "-o",
        'plugins.block=["cpu"]',
        "-o",
        "cache.memory=1MiB",
        "-o",
        "engine.max_model_len=64",
    ]
    assert run_command([*arguments, "-o", "cache.swap=1MiB"]) == 0
    assert "1.0 MiB of host memory in " in " ".join(capsys.readouterr().out.split())
    assert run_command(arguments) == 0
    assert "of host memory" not in capsys.readouterr().out


def test_a_cache_that_cannot_swap_refuses_by_name(tiny):
    _, plugin = vmm_plugin()
    for use, plugins in (("contiguous", []), ("vmm_faked", [plugin])):
        section = {"use": use, "memory": "1MiB", "swap": "1MiB"}
        with pytest.raises(
            CompositionError, match=rf"cache\.swap: '1MiB' .* cache '{use}' keeps no pages in host memory"
        ) as refused:
            engine_of(tiny, engine={"max_model_len": 64} | PLAIN, cache=section, plugins=plugins)
        assert refused.value.field == "cache.swap"


@pytest.mark.parametrize(
    ("swap", "message"),
    [("100", "holds no page of 16384 bytes; '16KiB' holds one"), ("9000TiB", "bytes of host memory are free beside")],
)
def test_a_size_that_is_of_no_use_or_not_there_is_refused(tiny, swap, message):
    with pytest.raises(CompositionError, match=rf"cache\.swap: '{swap}' is asked for, and .*{message}"):
        inflight(tiny, swap)


@pytest.mark.parametrize("ranks", [{"pp": 2}, pytest.param({"tp": 2}, marks=pytest.mark.slow)])
def test_ranks_that_share_a_model_swap_as_one(tiny, ranks):
    prompts = random_prompts(6, 20)
    expected = alone(tiny, prompts, MIXED)
    # Each rank has half of every token.
    memory = str(10 * 16 * TOKEN_BYTES // 2)
    section = {"use": "paged", "memory": memory, "swap": "1MiB", "swap_when": "always"}
    sections = {"cache": section, "engine": {"max_model_len": 64, "plugins": {"block": ["cpu"]}}}
    with parallel(tiny, **ranks, sections=sections) as engine:
        found = engine.generate(prompts, MIXED)
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=1e-4)
        figures = engine.stats()["preemption"]
        assert figures["swap"]["ins"] > 0 and figures["recomputed_tokens"] == 0 and figures["swap"]["bytes_per_s"] > 0
        assert is_idle(engine)
