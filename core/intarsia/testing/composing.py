"""Composing engines' parts for suites: a tiny model, the plain parts, and one part that is on trial."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attrs import evolve

from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.hookspecs import hookimpl, kind_of
from intarsia.plugins import Registry
from intarsia.protocols import Parts
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import EngineConfig, Provider

__all__ = ["BAD_ID", "KEY", "NUM_IDS", "PLAIN", "composed", "offered", "spoiled_model", "temporary_folder"]

#: What configs call the part on trial.
KEY = "on_trial"
#: Token ids of the tiny model, and the one whose embedding is not a number: whoever has it in a prompt fails.
NUM_IDS = 64
BAD_ID = NUM_IDS - 1
#: Sections of a config that leave everything to the plain parts of the core.
PLAIN: Mapping[str, Any] = {
    "kernels": "torch",
    "attention": "eager",
    "runner": "eager",
    "scheduler": "static",
    "cache": {"use": "paged", "page_size": 4, "memory": "128KiB"},
}


@cache
def temporary_folder() -> Path:
    """Return a folder that lives as long as this process."""
    folder = tempfile.mkdtemp(prefix="intarsia-testing-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@cache
def spoiled_model() -> Path:
    """Return the folder of a tiny random llama of which the id `BAD_ID` has an embedding that is not a number.

    Its logit is 0 in all company, so that no greedy request chooses it; others ban it.
    """
    from safetensors.torch import load_file, save_file

    folder = save_tiny_model(temporary_folder() / "spoiled", num_ids=NUM_IDS)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_ID] = float("nan")
    tensors["lm_head.weight"][BAD_ID] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def offered(**providers: Provider) -> object:
    """Return a plugin that offers providers, by slot: each under its own key."""
    kept = {kind_of(slot).hook: [provider] for slot, provider in providers.items()}
    functions = {hook: _implementation(hook, mine) for hook, mine in kept.items()}
    return type("suite", (), functions)


def _implementation(hook: str, providers: list[Provider]) -> Any:
    def provide() -> list[Provider]:
        return providers

    return staticmethod(hookimpl(specname=hook)(provide))


def composed(
    model: Path,
    sections: Mapping[str, Any],
    plugins: Sequence[object] = (),
    **trial: Provider,
) -> tuple[EngineConfig, Parts]:
    """Return a config and the parts of its engine, on a CPU, in fp32 and with one thread unless sections say otherwise.

    Args:
        model: its folder.
        sections: of the config; those of `PLAIN` stand behind them.
        plugins: besides those that are installed.
        trial: slot -> the provider that the config can name by `KEY`.
    """
    engine = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 64}
    merged = {**PLAIN, **sections, "model": str(model), "engine": engine | dict(sections.get("engine", {}))}
    config = load_config(merged)
    mine = [offered(**{slot: evolve(provider, key=KEY) for slot, provider in trial.items()})] if trial else []
    named = {f"suite-{number}": plugin for number, plugin in enumerate([*mine, *plugins])}
    return config, compose(config, Registry.discover(config.engine.plugins, named))
