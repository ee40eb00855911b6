"""An engine for suites of frontends: a real one of a tiny model, which can be held up, slowed down and broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import define, field

from intarsia.testing.composing import PLAIN, spoiled_model
from intarsia.types import Completion, Output, Request, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine

__all__ = ["MAX_LEN", "WatchedEngine", "answered", "engine_sections", "forget_engine"]

#: Tokens of the longest sequence, prompt and answer.
MAX_LEN = 512
#: How long a step waits at most until it may go on.
_HELD_S = 60.0
#: The engine that nobody serves, for one thread at a time, and what it has answered.
_ALONE = threading.Lock()
_ANSWERS: dict[tuple[tuple[int, ...], str], Completion] = {}


def engine_sections() -> dict[str, Any]:
    """Return the config of the engine that is served."""
    engine = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": MAX_LEN}
    scheduler = {"use": "inflight", "max_batch": 8, "max_waiting": 8}
    cache = {"use": "paged", "memory": "2MiB"}
    parts = {"scheduler": scheduler, "cache": cache, "executor": "local", "attention": "tiled"}
    return {**PLAIN, **parts, "model": str(spoiled_model()), "engine": engine}


def _engine() -> Engine:
    from intarsia.engine import Engine

    return Engine.from_config(engine_sections())


_alone, _served = cache(_engine), cache(_engine)


def forget_engine() -> None:
    """Have the next claim served by another engine: what became of this one is not known."""
    _served.cache_clear()


def answered(prompt: Sequence[int], params: SamplingParams) -> Completion:
    """Return what an engine answers that nobody serves; any thread may ask."""
    with _ALONE:
        key = (tuple(prompt), str(params))
        if key not in _ANSWERS:
            _ANSWERS[key] = _alone().generate([list(prompt)], params)[0]
        return _ANSWERS[key]


@define(eq=False)
class WatchedEngine:
    """Passes calls on to an engine that serves many claims, one after another.

    Attributes:
        may_step: cleared, it holds the next step up.
        pace_s: what each step takes besides.
        broken: what the next step raises; None where it is well.
        steps: that ran.
        live: ids of requests that were taken and have not ended.
        threads: that called it.
        closed: how often it was closed.
    """

    pace_s: float = 0.0
    may_step: threading.Event = field(factory=threading.Event, init=False)
    broken: Exception | None = field(default=None, init=False)
    steps: int = field(default=0, init=False)
    live: dict[str, int] = field(factory=dict, init=False)
    threads: set[int] = field(factory=set, init=False)
    closed: int = field(default=0, init=False)
    _inner: Engine = field(factory=lambda: _served(), init=False)

    def __attrs_post_init__(self) -> None:
        self.may_step.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _note(self) -> None:
        self.threads.add(threading.get_ident())

    @property
    def has_work(self) -> bool:
        """Pass it on."""
        return self._inner.has_work

    def add(self, request: Request) -> str:
        """Pass it on."""
        self._note()
        name = self._inner.add(request)
        self.live[name] = request.params.n
        return name

    def cancel(self, request_id: str) -> None:
        """Pass it on."""
        self._note()
        self._inner.cancel(request_id)

    def step(self) -> Sequence[Output]:
        """Wait until it may, and pass it on; or raise what it is told to."""
        self._note()
        self.may_step.wait(_HELD_S)
        if self.broken is not None:
            raise self.broken
        if self.pace_s:
            time.sleep(self.pace_s)
        self.steps += 1
        outputs = self._inner.step()
        for output in outputs:
            if output.finish_reason is not None and output.request_id in self.live:
                self.live[output.request_id] -= 1
                if not self.live[output.request_id]:
                    del self.live[output.request_id]
        return outputs

    def stats(self) -> Mapping[str, Any]:
        """Pass it on."""
        return self._inner.stats()

    def close(self) -> None:
        """Drop what is left of requests, and keep the engine for the next claim."""
        self._note()
        self.closed += 1
        for request_id in list(self.live):
            self._inner.cancel(request_id)
        while self._inner.has_work:
            self._inner.step()
        self.live.clear()
