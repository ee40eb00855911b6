"""The work that every engine is measured on: lists of (prompt ids, tokens to generate).

All is greedy and goes on past any end of sequence.

The scripts beside this file run in venvs of their own and import nothing else of Intarsia.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

Work = list[tuple[list[int], int]]

#: Prompt ids are drawn from here, both ends included.
FIRST_ID, LAST_ID = 100, 40000


def _ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(n)]


def decode1(rng: random.Random) -> Work:
    """One answer: 128 tokens, then 64 after the first."""
    return [(_ids(rng, 128), 65)]


def prefill(rng: random.Random) -> Work:
    """One prompt of 2048 tokens."""
    return [(_ids(rng, 2048), 1)]


def decode16(rng: random.Random) -> Work:
    """16 answers at once: 128 tokens each, then 32 after the first."""
    return [(_ids(rng, 128), 33) for _ in range(16)]


def mixed(rng: random.Random) -> Work:
    """48 requests at once, prompts of 16 to 768 tokens, answers of 8 to 192."""
    out = []
    for _ in range(48):
        prompt = min(768, max(16, int(rng.lognormvariate(5.0, 0.9))))
        output = min(192, max(8, int(rng.lognormvariate(3.8, 0.8))))
        out.append((_ids(rng, prompt), output))
    return out


def prefix(rng: random.Random) -> Work:
    """16 requests that share 1024 tokens and have 32 of their own; answers of 16."""
    shared = _ids(rng, 1024)
    return [(shared + _ids(rng, 32), 16) for _ in range(16)]


ALL: dict[str, Callable[[random.Random], Work]] = {f.__name__: f for f in (decode1, prefill, decode16, mixed, prefix)}
#: Workloads whose rate leaves out the first token: the time of the same work with one token is subtracted.
WITHOUT_FIRST = frozenset({"decode1", "decode16"})
#: Prompts of the subtracted runs are drawn with seeds from here on.
FRESH = 1000


def work(name: str, seed: int) -> Work:
    """Return a workload with the prompts of this seed. No two begin alike, or a prefix cache would find it."""
    return ALL[name](random.Random(f"{name} {seed}"))  # noqa: S311


def warm_up() -> Work:
    """Return what every engine runs once before it is measured."""
    return [(_ids(random.Random(99), 16), 4)]  # noqa: S311


def num_counted(name: str, seed: int) -> int:
    """Return the tokens whose rate is reported: of the prompt for `prefill`, generated ones elsewhere."""
    requests = work(name, seed)
    if name == "prefill":
        return sum(len(ids) for ids, _ in requests)
    return sum(n - (name in WITHOUT_FIRST) for _, n in requests)


def measure(name: str, repeat: int, generate: Callable[[Work], object]) -> float:
    """Return the seconds that one repeat takes.

    Prompts are new in every repeat, and in the run that is subtracted, so that no prefix cache answers from an earlier
    one.
    """
    seconds = _timed(generate, work(name, repeat))
    if name in WITHOUT_FIRST:
        seconds -= _timed(generate, [(ids, 1) for ids, _ in work(name, FRESH + repeat)])
    return seconds


def _timed(generate: Callable[[Work], object], requests: Work) -> float:
    start = time.perf_counter()
    generate(requests)
    return time.perf_counter() - start


def own_stdout() -> TextIO:
    """Take stdout for the protocol; what libraries print goes to stderr. Call it before the engine is imported."""
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return protocol


def serve(protocol: TextIO, generate: Callable[[Work], object]) -> None:
    """Measure what is asked for, until stdin ends. Both sides speak JSON, an object a line.

    First `{"ready": true}` goes out. `{"workload": "mixed", "repeat": 0}` comes in and is answered with
    `{"seconds": 1.5}`.
    """

    def say(message: dict[str, Any]) -> None:
        protocol.write(json.dumps(message) + "\n")
        protocol.flush()

    generate(warm_up())
    say({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        say({"seconds": measure(asked["workload"], asked["repeat"], generate)})
