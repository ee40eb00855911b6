"""Other clients of a server, in a process of their own, for a neighbour to be measured beside.

`python -m intarsia_bench.visitors ADDRESS stays` reads one stream for ever.
`python -m intarsia_bench.visitors ADDRESS 50` has so many clients come and go, a few at a time.
Both print a line when they are ready; the second then waits for one, and prints another at its end.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from intarsia.types import SamplingParams
from intarsia_zmq import Client

#: Tokens that a visitor wants; some leave before the end.
_WANTED = 8
_LEAVES_EARLY = 3
_AT_ONCE = 2


def stay(address: str) -> None:
    """Read streams, one after another."""
    with Client(address) as client:
        while True:
            for count, _ in enumerate(client.stream([1], SamplingParams(max_tokens=4000, temperature=0))):
                if count == 0:
                    _say("ready")


def come_and_go(address: str, visits: int) -> None:
    """Have so many clients visit."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        _say("ready")
        sys.stdin.readline()
        list(threads.map(partial(_visit, address), range(visits)))
    _say("done")


def _visit(address: str, number: int) -> None:
    """Connect, ask, read it all or leave early, and disconnect."""
    with Client(address) as client:
        for count, _ in enumerate(client.stream([1], SamplingParams(max_tokens=_WANTED, temperature=0))):
            if number % _LEAVES_EARLY == 0 and count == 1:
                break


def _say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[2] == "stays":
        stay(sys.argv[1])
    else:
        come_and_go(sys.argv[1], int(sys.argv[2]))
