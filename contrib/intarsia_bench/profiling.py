"""Where a step's time goes besides the model: scheduling, the cache's books, batches, sampling, text.

Probes are put around the functions below while the profile runs, and taken off again. Each counts the time that is its
own: what a probe inside of it counts is not counted twice.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, frozen

from intarsia import Engine, Request, SamplingParams
from intarsia_bench.peers import workloads

if TYPE_CHECKING:
    from intarsia.protocols import Parts

#: Section of a step -> what it is. The engine's own is the rest of `Engine.step`.
SECTIONS = {
    "scheduling": "plan and update",
    "cache books": "reserve, pages and commit",
    "batch building": "rows to tensors, what attention prepares",
    "model": "layers, and logits or likeliest ids",
    "sampling": "choosing tokens",
    "text": "detokenizing, stop strings",
    "executor": "the rest of submit and collect",
    "engine": "the rest of the step: sequences, outputs",
}
#: The issue's target for all sections but the model, in milliseconds a step.
TARGET_MS = 1.0

_WORKLOAD = "decode16"
#: Functions of the core, by section. `LocalExecutor._run` without what is measured inside of it is the layers.
_FUNCTIONS = {
    "intarsia.stage:forward_batch": "batch building",
    "intarsia.executor:LocalExecutor._run": "model",
    "intarsia.executor:LocalExecutor._logits": "model",
    "intarsia.stage:ModelStage.likeliest": "model",
    "intarsia.executor:LocalExecutor.submit": "executor",
    "intarsia.executor:LocalExecutor.collect": "executor",
    "intarsia.sampling:Sampler.choose": "sampling",
    "intarsia.sampling:Sampler.take": "sampling",
    "intarsia.text:TextStream.push": "text",
    "intarsia.text:TextStream.finish": "text",
    "intarsia.engine:Engine.step": "engine",
}
_METHODS = {
    "scheduler": ("scheduling", ("plan", "update", "remove")),
    "cache": ("cache books", ("reserve", "pages", "commit", "release", "take_moves", "lookup")),
    "attention": ("batch building", ("prepare",)),
}


@define
class Clock:
    """Adds up seconds by section."""

    now: Callable[[], float] = time.perf_counter
    seconds: dict[str, float] = Factory(lambda: dict.fromkeys(SECTIONS, 0.0))
    _inside: list[float] = Factory(list)

    def timed(self, section: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts its own time."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                spent = self.now() - start
                self.seconds[section] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent

        return call

    def take(self) -> dict[str, float]:
        """Return what was added up, and begin anew."""
        taken, self.seconds = self.seconds, dict.fromkeys(SECTIONS, 0.0)
        return taken


@contextlib.contextmanager
def probes(parts: Parts, clock: Clock) -> Iterator[None]:
    """Put probes around the sections' functions for the length of the block."""
    targets: list[tuple[Any, str, str]] = []
    for path, section in _FUNCTIONS.items():
        module, _, name = path.partition(":")
        holder, _, attribute = name.rpartition(".")
        targets.append((pkgutil.resolve_name(f"{module}:{holder}" if holder else module), attribute, section))
    for slot, (section, names) in _METHODS.items():
        part = type(getattr(parts, slot))
        targets += [(part, name, section) for name in names]
    with contextlib.ExitStack() as undo:
        for holder, name, section in targets:
            whole = getattr(holder, name)
            if name in vars(holder):
                undo.callback(setattr, holder, name, vars(holder)[name])
            else:  # inherited
                undo.callback(delattr, holder, name)
            setattr(holder, name, clock.timed(section, whole))
        yield


@frozen
class Profile:
    """Median milliseconds a decode16 step, by section; `outside` is the median of all but the model."""

    sections: dict[str, float]
    outside: float
    num_steps: int


def profile(engine: Engine, repeats: int) -> Profile:
    """Run decode16 and measure the steps in which all 16 rows decode."""
    clock = Clock()
    steps = []
    with probes(engine.parts, clock):
        for repeat in range(repeats):
            steps += _decode_steps(engine, clock, repeat)
    sections = {name: 1e3 * statistics.median(step[name] for step in steps) for name in SECTIONS}
    outside = 1e3 * statistics.median(sum(step.values()) - step["model"] for step in steps)
    return Profile(sections, outside, len(steps))


def _decode_steps(engine: Engine, clock: Clock, repeat: int) -> list[dict[str, float]]:
    """Return the seconds by section of each step that brought every request a token, but its first or last."""
    requests = workloads.work(_WORKLOAD, repeat)
    for index, (ids, num_tokens) in enumerate(requests):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
        engine.add(Request(request_id=f"bench-{index}", prompt=ids, params=params))
    steps = []
    answered: set[str] = set()
    while engine.has_work:
        clock.take()
        outputs = engine.step()
        seconds = clock.take()
        came = {output.request_id for output in outputs}
        is_last = any(output.finish_reason is not None for output in outputs)
        if len(came) == len(requests) and came <= answered and not is_last:
            steps.append(seconds)
        answered |= came
    return steps
