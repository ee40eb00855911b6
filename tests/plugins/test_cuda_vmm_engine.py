"""Engines over the cache `vmm`, on a device that is faked: tokens are those of the contiguous cache."""

import pytest

from engines import count_preemptions, engine_of
from intarsia import Request, SamplingParams
from intarsia.errors import CompositionError
from models import tiny_llama
from virtual_memory import vmm_plugin

PROMPTS = [[5, 9, 2], list(range(40, 77)), [7] * 16, [100, 3, 3, 8, 1] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


PLAIN = {"runner": "eager", "attention": "eager", "kernels": ["torch"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2)[0]


@pytest.fixture(scope="module")
def expected(model):
    with engine_of(
        model, cache={"use": "contiguous", "memory": "4MiB"}, engine={"max_model_len": 64}, **PLAIN
    ) as engine:
        return [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)]


def vmm_engine(model, plugin, size="4MiB", **sections):
    cache = {"use": "vmm_faked", "memory": size, **sections.pop("cache", {})}
    engine = {"max_model_len": 64, **sections.pop("engine", {})}
    return engine_of(model, cache=cache, plugins=[plugin], engine=engine, **(PLAIN | sections))


PARTS = [
    pytest.param({}, id="eager"),
    pytest.param({"attention": "sdpa", "cache": {"page_size": 5}}, id="sdpa in pages of 5"),
    pytest.param({"runner": "auto", "attention": "auto", "kernels": ["auto"]}, id="auto", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("granule", [512, 8192])
def test_tokens_equal_those_of_the_contiguous_cache(model, expected, parts, granule):
    memory, plugin = vmm_plugin(granule)
    with vmm_engine(model, plugin, **parts) as engine:
        for _ in range(2):
            assert [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)] == expected
            memory.check()
            engine.parts.cache.check_integrity()
    memory.assert_clean()


def test_memory_is_back_when_the_last_request_is_gone(model):
    memory, plugin = vmm_plugin(512)
    with vmm_engine(model, plugin, cache={"keep": "0"}) as engine:
        idle = len(memory.handles)
        engine.generate(PROMPTS, GREEDY)
        assert len(memory.handles) == idle and memory.peak > 4 * idle
        engine.add(Request(request_id="gone", prompt=PROMPTS[1], params=GREEDY))
        for _ in range(3):
            engine.step()
        assert len(memory.handles) > idle
        engine.cancel("gone")
        engine.step()
        assert len(memory.handles) == idle
        assert engine.stats()["cache"]["used"] == 0


def test_preempted_sequences_get_their_tokens_and_memory_stays_within_its_budget(model, expected):
    memory, plugin = vmm_plugin(1024)
    with vmm_engine(model, plugin, "72KiB", scheduler="inflight") as engine:
        always = len(memory.handles)
        preempted = count_preemptions(engine)
        assert [answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)] == expected
        assert preempted
        assert memory.peak <= engine.parts.cache.num_granules + always
        memory.check()


def test_choices_and_drafts_change_nothing(model, expected):
    memory, plugin = vmm_plugin(512)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, n=3)
    with vmm_engine(model, plugin, drafter={"use": "ngram", "adaptive": False}, scheduler="inflight") as engine:
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            answer = engine.generate([prompt], params)[0]
            assert [choice.token_ids for choice in answer.choices] == [tokens] * 3
        memory.check()
    memory.assert_clean()


def test_int8_entries_lie_in_mapped_memory_too(model):
    answers = []
    for use in ("contiguous", "vmm_faked"):
        memory, plugin = vmm_plugin(512)
        with vmm_engine(model, plugin, cache={"use": use, "format": "int8"}) as engine:
            answers.append([answer.token_ids for answer in engine.generate(PROMPTS, GREEDY)])
            memory.check()
    assert answers[0] == answers[1]


def test_logits_outside_an_engine_are_run_over_mapped_memory(model):
    from intarsia.config import load_config
    from intarsia.forwarding import ComposedModel

    (memory, plugin), found = vmm_plugin(512), []
    for use in ("contiguous", "vmm_faked"):
        config = {"model": str(model), "engine": {"dtype": "float32", "max_model_len": 64}}
        config = load_config(config | PLAIN | {"cache": {"use": use, "memory": "4MiB"}})
        with ComposedModel.compose(config, plugins=[plugin]) as composed:
            composed.start(lambda *_: None)
            for _ in range(2):
                found.append([rows.clone() for rows in composed.logits(PROMPTS[1])])
    assert all((one == other).all() for one, other in zip(found[0], found[2], strict=True))
    assert all((one == other).all() for one, other in zip(found[2], found[3], strict=True))
    memory.assert_clean()


def test_on_a_cpu_it_says_what_it_is_for(model):
    with pytest.raises(CompositionError, match=r"cache: 'vmm' cannot be used here: it maps the memory of NVIDIA GPUs"):
        engine_of(model, cache={"use": "vmm", "memory": "4MiB"}, **PLAIN)
