"""Every family against transformers: tiny random models in fp32, one line of `tests/families.py` each."""

import copy
import random

import attrs
import pytest
import torch

from engines import count_preemptions, engine_of
from families import CASES, as_version_4, config_of, saved
from intarsia import SamplingParams
from intarsia.defaults import provide_models as provide_llama
from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext
from intarsia.testing import poison_cache, prompt_logits
from intarsia_families import provide_models

NEW_TOKENS = 12


@attrs.frozen
class Saved:
    case: object
    path: object
    model: object

    def prompts(self):
        rng = random.Random(7)
        return [[rng.randrange(256) for _ in range(length)] for length in self.case.lengths]

    def engine(self, *, page_size=16, cache="paged", memory="64MiB", scheduler=None, **engine):
        made = engine_of(
            self.path,
            engine={"max_model_len": self.case.max_model_len} | engine,
            cache={"use": cache, "page_size": page_size, "memory": memory},
            scheduler=scheduler or {"use": "inflight"},
        )
        poison_cache(made)
        return made


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def tiny(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    return Saved(request.param, path, saved(request.param, path))


@torch.no_grad()
def reference(model, prompt):
    return model(torch.tensor([prompt])).logits[0].float()


@pytest.mark.parametrize(("page_size", "chunks"), [(1, (7,)), (16, (1, 7, None)), (64, (None, 7))])
def test_logits_of_every_position_equal_transformers_in_any_chunks_and_pages(tiny, page_size, chunks):
    prompt = tiny.prompts()[0]
    expected = reference(tiny.model, prompt)
    with tiny.engine(page_size=page_size) as engine:
        for chunk in chunks:
            found = prompt_logits(engine, prompt, chunk=chunk)
            assert float((found - expected).abs().max()) <= 1e-4
            poison_cache(engine)


def generated(model, prompt):
    """What transformers generates greedily, with its cache."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return tuple(found[0, len(prompt) :].tolist())


def test_greedy_ids_of_a_mixed_batch_equal_what_transformers_generates(tiny):
    prompts = tiny.prompts()
    expected = [generated(tiny.model, prompt) for prompt in prompts]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with tiny.engine(scheduler={"use": "inflight", "max_tokens": 24}) as engine:
        assert [c.token_ids for c in engine.generate(prompts, greedy)] == expected
    with tiny.engine(cache="contiguous", scheduler={"use": "static", "max_batch": 3}) as engine:
        assert [c.token_ids for c in engine.generate(prompts, greedy)] == expected


def test_logprobs_have_the_same_bits_in_any_company_chunks_and_after_preemption(tiny):
    prompts = tiny.prompts()
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=t, seed=i, ignore_eos=True, logprobs=2, prompt_logprobs=p)
        for i, (t, p) in enumerate([(0, None), (1.1, None), (0, 1), (0.7, None)])
    ]
    with tiny.engine() as engine:
        assert engine.explain()["invariance"]["level"] == "bitwise"
        page_bytes = engine.parts.layout.page_bytes
        expected = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    # Room for one sequence of the greatest length, and a few tokens a step. Windows leave much of it: all come thrice.
    memory = str(page_bytes * tiny.case.max_model_len // 16)
    with tiny.engine(memory=memory, scheduler={"use": "inflight", "max_tokens": 12}) as engine:
        preempted = count_preemptions(engine)
        found = engine.generate(prompts * 3, params * 3)
        engine.parts.cache.check_integrity()
        assert preempted
    for one, other in zip(found, expected * 3, strict=True):
        assert one.choices == other.choices
        assert one.prompt_logprobs == other.prompt_logprobs


def test_the_weight_map_names_exactly_the_tensors_that_were_saved(tiny):
    with tiny.engine() as engine:
        parts = engine.parts
    read = {
        name: shape
        for source in parts.weight_map.tensors.values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    tensors, ignores = parts.checkpoint.tensors, parts.weight_map.ignores
    stored = {name: tensor.shape for name, tensor in tensors.items() if not ignores(name)}
    assert read == stored


# --- configs ----------------------------------------------------------------------------------------------------------


def spec_of(config):
    """Return the spec that the family of a config reads, where the checkpoint has a head."""
    offers = {provider.key: provider for provide in (provide_models, provide_llama) for provider in provide()}
    family = offers[config["model_type"]].build(ModelContext(config=config))
    return family.spec(config, frozenset({"lm_head.weight"}))


def test_both_spellings_of_a_config_mean_the_same(tiny):
    config = config_of(tiny.path)
    assert "rope_theta" not in config
    assert spec_of(as_version_4(config)) == spec_of(config)


def test_fields_that_a_config_leaves_out_have_the_defaults_of_transformers(tiny):
    config = config_of(tiny.path)
    short = tiny.case.config.to_diff_dict() | {"model_type": config["model_type"]}
    assert len(short) < len(config)
    assert spec_of(short) == spec_of(config)


def fill(short, full, path):
    """Copy the value at a path, such as `text_config.hidden_size`, from a full config to a short one."""
    name, _, rest = path.partition(".")
    if rest:
        fill(short.setdefault(name, {}), full[name], rest)
    else:
        short[name] = full[name]


KINDS = {type(case.config).model_type: type(case.config) for case in CASES}


@pytest.mark.parametrize("model_type", KINDS)
def test_a_config_of_sizes_alone_means_the_defaults_of_transformers(model_type):
    full = KINDS[model_type]().to_dict()
    short = {"model_type": model_type}
    for _ in range(8):  # sizes that no family has a default for
        try:
            found = spec_of(short)
            break
        except CheckpointError as error:
            assert f"{error.field} is missing" in str(error)
            fill(short, full, error.field)
    assert found == spec_of(full)


# --- bf16 -------------------------------------------------------------------------------------------------------------


def test_bf16_is_as_near_to_fp32_as_bf16_of_transformers(tiny):
    """Both round; their errors, and what is between them, are of one size."""
    prompt = tiny.prompts()[0]
    exact = reference(tiny.model, prompt)
    theirs = reference(copy.deepcopy(tiny.model).to(torch.bfloat16), prompt)
    with tiny.engine(dtype="bfloat16") as engine:
        ours = prompt_logits(engine, prompt, chunk=16)
    bound = 1.5 * float((theirs - exact).abs().mean())
    assert float((ours - exact).abs().mean()) < bound
    assert float((ours - theirs).abs().mean()) < bound
