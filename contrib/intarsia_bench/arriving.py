"""Requests that arrive one after another, most of them short and a few very long: where schedulers differ most.

How fast they come depends on the machine: so that each sees the same load, the default composition is timed on the same
requests at once before anything is measured.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from attrs import frozen

from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError
from intarsia_bench.composition import Composition, run
from intarsia_bench.contender import Measurement
from intarsia_bench.gains import ARRIVALS, Pairs
from intarsia_bench.latency import Latencies
from intarsia_bench.peers import workloads
from intarsia_bench.rounds import SETTLE_S

if TYPE_CHECKING:
    from intarsia.engine import Engine
    from intarsia.protocols import Progress

#: Of so many requests every eighth has a long answer.
NUM_REQUESTS: Final = 160
_LONG_EVERY: Final = 8
_PROMPT: Final = (16, 64)
_SHORT: Final = (4, 16)
_LONG: Final = (160, 192)
#: They come so many times as fast as the default composition answers them, so that most of them wait.
LOAD: Final = 4.0


@frozen
class Arrival:
    """A request: seconds after the first that it comes, its prompt, tokens to generate."""

    at_s: float
    ids: list[int]
    num_tokens: int


def skewed(repeat: int, mean_gap_s: float, count: int = NUM_REQUESTS) -> list[Arrival]:
    """Return the requests of one repeat, with gaps that are drawn exponentially."""
    rng = random.Random(f"{ARRIVALS} {repeat}")  # noqa: S311
    made, at_s = [], 0.0
    for number in range(count):
        low, high = _LONG if number % _LONG_EVERY == _LONG_EVERY // 2 else _SHORT
        ids = [rng.randint(workloads.FIRST_ID, workloads.LAST_ID) for _ in range(rng.randint(*_PROMPT))]
        made.append(Arrival(at_s, ids, rng.randint(low, high)))
        at_s += rng.expovariate(1.0) * mean_gap_s
    return made


def answer(engine: Engine, arrivals: Sequence[Arrival]) -> Measurement:
    """Add each request when its time has come, and step; latencies are from when it should have come.

    Raises:
        ExecutionError: an answer is not as long as it was asked to be.
    """
    came: list[list[tuple[float, int]]] = [[] for _ in arrivals]
    begun, added = time.perf_counter(), 0
    while added < len(arrivals) or engine.has_work:
        now = time.perf_counter() - begun
        while added < len(arrivals) and arrivals[added].at_s <= now:
            one = arrivals[added]
            params = SamplingParams(max_tokens=one.num_tokens, temperature=0, ignore_eos=True, seed=0)
            engine.add(Request(request_id=f"bench-{added}", prompt=one.ids, params=params))
            added += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[added].at_s - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - begun
        for output in outputs:
            if output.error is not None:
                raise ExecutionError(f"{output.request_id}: {output.error}")
            came[int(output.request_id.removeprefix("bench-"))].append((now, len(output.token_ids)))
    seconds = time.perf_counter() - begun
    for number, (steps, one) in enumerate(zip(came, arrivals, strict=True)):
        count = sum(n for _, n in steps)
        if count != one.num_tokens:
            raise ExecutionError(f"bench-{number}: {count} tokens came, and {one.num_tokens} were asked for")
    return Measurement(seconds, Latencies.of_each(zip((one.at_s for one in arrivals), came, strict=True)))


def compare(
    default: Composition, swaps: Sequence[Composition], repeats: int, *, progress: Progress, count: int = NUM_REQUESTS
) -> list[Pairs]:
    """Run the arrivals on all compositions in turn; return each swap's repeats beside the default's."""
    progress(f"{ARRIVALS}: how fast the default is", 0, 1)
    calm = [(one.ids, one.num_tokens) for one in skewed(workloads.FRESH, 0.0, count)]
    begun = time.perf_counter()
    run(default.engine, calm)
    gap_s = (time.perf_counter() - begun) / count / LOAD
    every = [default, *swaps]
    found: list[list[Measurement]] = [[] for _ in every]
    for done, (repeat, number) in enumerate(itertools.product(range(repeats), range(len(every)))):
        progress(f"{ARRIVALS} {repeat + 1}/{repeats}: {every[number].name}", done, repeats * len(every))
        time.sleep(SETTLE_S)
        found[number].append(answer(every[number].engine, skewed(repeat, gap_s, count)))
    counts = [sum(one.num_tokens for one in skewed(repeat, gap_s, count)) for repeat in range(repeats)]
    return [Pairs(ARRIVALS, one.name, found[0], mine, counts) for one, mine in zip(swaps, found[1:], strict=True)]
