"""Engines of tiny models, for suites: parts whose results do not depend on the batch, and nothing to compile."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from intarsia.errors import ConfigError
from intarsia.hookspecs import hookimpl, kind_of
from intarsia.plugins import Registry
from intarsia.types import Provider, Request, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine

__all__ = ["ask", "configured", "offering", "said", "scratch", "tiny_config", "token_bytes", "unharmed"]

T = TypeVar("T")


@contextmanager
def scratch() -> Iterator[Path]:
    """Lend an empty folder."""
    with tempfile.TemporaryDirectory(prefix="intarsia-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def tiny_config(model: Path, **sections: Any) -> dict[str, Any]:
    """Return the config of an fp32 engine on the CPU; sections go over its own, and options of `engine` into it."""
    engine = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128} | sections.pop("engine", {})
    parts = {"cache": {"memory": "16MiB"}, "kernels": "torch", "attention": "tiled", "runner": "eager"}
    return {"model": str(model), "engine": engine, "executor": "local", **parts, **sections}


def token_bytes(num_tokens: int) -> int:
    """Return the bytes of so many tokens in a tiny model's cache: 2 layers, keys and values of 16 numbers in fp32."""
    return num_tokens * 2 * 2 * 16 * 4


def offering(slot: str, provider: Provider) -> list[object]:
    """Return the plugins that an engine is passed to find a provider: none where a part of its key is installed."""
    if provider.key in Registry.discover().offers(slot):
        return []
    hook = kind_of(slot).hook

    def provide(self: object) -> list[Provider]:
        del self
        return [provider]

    provide.__name__ = hook
    return [type("Tried", (), {hook: hookimpl(provide)})()]


def ask(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, name: str = "again", salt: str = ""
) -> list[int]:
    """Ask by hand, under an id; return the ids of all choices, one after another."""
    engine.add(Request(request_id=name, prompt=list(prompt), params=params, cache_salt=salt))
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            if output.request_id == name:
                assert output.error is None, output.error
                ids += output.token_ids
    return ids


def said(choice: Any) -> tuple[Any, ...]:
    """Return what a choice says, with log-probabilities as far as chunks leave them."""
    assert choice.error is None, choice.error
    logprobs = [round(entry.logprob, 3) for entry in choice.logprobs or ()]
    return tuple(choice.token_ids), choice.finish_reason, logprobs


def configured(call: Callable[..., T], *args: Any) -> T:
    """Return what a call returns; options that a part needs, and that nobody gave, the contract is to be told.

    Raises:
        NotImplementedError: says which.
    """
    try:
        return call(*args)
    except ConfigError as error:
        raise NotImplementedError(f"say in `options` what the part needs: {error}") from error


def unharmed(doing: str, call: Callable[..., T], *args: Any) -> T:
    """Return what a call returns; what it raises is a fault."""
    try:
        return call(*args)
    except Exception as error:
        raise AssertionError(f"{doing}: {type(error).__name__}: {error}") from error
