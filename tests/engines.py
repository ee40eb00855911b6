"""Engines for tests: tiny models, and models that say what they are told in SmolLM2's tokens."""

import json
from functools import cache
from pathlib import Path

from attrs import evolve

from intarsia import Engine
from intarsia.protocols import LoaderContext
from intarsia.references import find_model
from intarsia.testing import scripted
from models import tiny_llama

#: Small enough for the many engines that tests make.
CACHE = {"memory": "64MiB"}


def engine_of(model, **sections):
    """Make an fp32 engine of a model folder; sections override the defaults."""
    options = {"dtype": "float32", "threads": 1} | sections.pop("engine", {})
    plugins = sections.pop("plugins", [])
    config = {"model": str(model), "engine": options, "cache": CACHE, **sections}
    return Engine.from_config(config, plugins=plugins)


@cache
def smollm2_tokenizer():
    """Return SmolLM2's tokenizer, as data, from the GGUF file."""
    from intarsia_gguf import provide_loaders

    (provider,) = provide_loaders()
    return provider.build(LoaderContext(path=find_model("smollm2"))).open().tokenizer()


def smollm2_shaped(tmp_path: Path) -> Path:
    """Save a tiny random model that has SmolLM2's vocabulary and tokenizer."""
    path, _ = tiny_llama(tmp_path, hidden=16, heads=2, kv_heads=1, layers=1, ffn=16, vocab=49152)
    spec = smollm2_tokenizer()
    (path / "tokenizer.json").write_text(spec.definition)
    config = {"chat_template": spec.chat_template, "add_bos_token": False, **spec.special_tokens}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return path


def scripted_engine(model, ids, *, prompt_tokens=1, guesses=None, **sections):
    """Make an engine whose answer to a prompt of one token is these ids, in turn, then 0 for ever."""
    runner = {"use": "scripted", "ids": list(ids), "prompt_tokens": prompt_tokens}
    if guesses is not None:
        sections["drafter"] = {"use": "scripted", "ids": list(guesses), "prompt_tokens": prompt_tokens}
    return engine_of(model, runner=runner, plugins=[scripted], **sections)


def count_preemptions(engine):
    """Return a list that grows with every sequence that the engine's scheduler preempts."""
    preempted, scheduler = [], engine.parts.scheduler

    class Watched:
        def plan(self):
            plan = scheduler.plan()
            preempted.extend(plan.preempted)
            return plan

        def __getattr__(self, name):
            return getattr(scheduler, name)

    engine.parts = evolve(engine.parts, scheduler=Watched())
    return preempted
