"""`intarsia bench serve`: what a server costs, and what its clients cost one another."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from intarsia import Request, SamplingParams
from intarsia.errors import ExecutionError
from intarsia_bench.composition import Composition
from intarsia_bench.contender import Measurement
from intarsia_bench.latency import Latencies
from intarsia_bench.peers import workloads
from intarsia_bench.rounds import SETTLE_S, run_rounds
from intarsia_bench.served import Child, ServedEngine
from intarsia_zmq import AsyncClient, Client

if TYPE_CHECKING:
    from intarsia.engine import Engine
    from intarsia.protocols import Progress
    from intarsia.types import EngineConfig

WORKLOAD = "mixed"
IN_PROCESS, SERVED = "in-process", "server"
#: Tokens of a prompt whose first token is waited for, and of its answer.
_FIRST_PROMPT, _FIRST_ANSWER = 64, 3
_FIRST_IDS = range(workloads.FIRST_ID, workloads.LAST_ID)


@frozen(kw_only=True)
class Sizes:
    """How much is measured.

    Attributes:
        streams: at once, one measurement each.
        repeats: of everything.
        tokens: of all streams together, in one repeat.
        seconds: that a neighbour is watched at a time.
        visits: clients that come and go beside it.
        firsts: first tokens a repeat.
        step_s: of the model that the neighbour is served by.
    """

    streams: tuple[int, ...] = (1, 64, 512)
    repeats: int = 5
    tokens: int = 40_000
    seconds: float = 3.0
    visits: int = 50
    firsts: int = 5
    step_s: float = 0.01


# --- streams of a model that computes nothing -------------------------------------------------------------------------


def stream_rates(sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    """Return the tokens a second that one Python client gets from a scripted model, by the number of streams."""
    rates: dict[int, list[float]] = {streams: [] for streams in sizes.streams}
    server = ServedEngine.scripted(streams=max(sizes.streams))
    with contextlib.closing(server):
        asyncio.run(_stream(server.address, max(sizes.streams), 4))  # buffers and caches have their sizes then
        for repeat in range(sizes.repeats):
            for streams, found in rates.items():
                progress(f"{streams} streams", repeat, sizes.repeats)
                # One stream alone is slow: less of it is as steady.
                each = max(2, sizes.tokens // max(streams, 20))
                time.sleep(SETTLE_S)
                found.append(streams * each / asyncio.run(_stream(server.address, streams, each)))
    return [{"streams": streams, **spread(found)} for streams, found in rates.items()]


async def _stream(address: str, streams: int, tokens: int) -> float:
    """Return the seconds that so many streams of so many tokens take, all at once, on one connection."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async with AsyncClient(address) as client:

        async def read() -> int:
            return sum([len(output.token_ids) async for output in client.stream([1], params)])

        await client.ping()
        begun = time.perf_counter()
        counts = await asyncio.gather(*(read() for _ in range(streams)))
        seconds = time.perf_counter() - begun
    _check(counts, [tokens] * streams)
    return seconds


def _check(counts: Sequence[int], wanted: Sequence[int]) -> None:
    if list(counts) != list(wanted):
        raise ExecutionError(f"{sum(counts)} tokens came, and {sum(wanted)} were asked for")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the most of tokens a second."""
    return {
        "tokens_per_s": round(statistics.median(values), 1),
        "min_tokens_per_s": round(min(values), 1),
        "max_tokens_per_s": round(max(values), 1),
    }


# --- a real model, with and without a server --------------------------------------------------------------------------


@define(eq=False)
class Served:
    """A contender: a composition behind a server, asked by one client over one connection."""

    name: str
    server: ServedEngine

    def measure(self, workload: str, repeat: int) -> Measurement:
        """Run one repeat; seconds and latencies are what the client sees."""
        runs: list[Latencies] = []

        def answer(requests: workloads.Work) -> None:
            runs.append(asyncio.run(_answer(self.server.address, requests)))

        return Measurement(workloads.measure(workload, repeat, answer), runs[0])

    def close(self) -> None:
        """End the server."""
        self.server.close()


async def _answer(address: str, requests: workloads.Work) -> Latencies:
    """Ask for all at once; return when tokens came."""
    async with AsyncClient(address) as client:
        arrived = time.perf_counter()

        async def read(ids: list[int], num_tokens: int) -> list[tuple[float, int]]:
            params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, seed=0)
            return [(time.perf_counter(), len(o.token_ids)) async for o in client.stream(ids, params)]

        came = await asyncio.gather(*(read(ids, num_tokens) for ids, num_tokens in requests))
    _check([sum(n for _, n in each) for each in came], [num_tokens for _, num_tokens in requests])
    return Latencies.of(arrived, came)


def compare(
    config: EngineConfig, arguments: Sequence[str], sizes: Sizes, progress: Progress
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure a composition in this process and behind a server, in turn.

    Args:
        config: the composition.
        arguments: those of the command line that name it.
        sizes: how often.
        progress: told of each measurement.

    Returns:
        Rows of throughput: engine, tokens_per_s with min and max, ratio; and of times to first token: engine, ttft_s,
        the median, and over_s, how much more that is than in this process.
    """
    with contextlib.ExitStack() as stack:
        progress("loading", 0, 2)
        own = Composition.open(IN_PROCESS, config, workload_names=[WORKLOAD], progress=progress)
        stack.enter_context(contextlib.closing(own))
        progress("loading the server", 1, 2)
        served = Served(SERVED, ServedEngine.of(arguments))
        stack.enter_context(contextlib.closing(served))
        asyncio.run(_answer(served.server.address, workloads.warm_up()))
        series = run_rounds([own, served], [WORKLOAD], sizes.repeats, progress=progress)
        firsts = first_tokens(own.engine, served.server.address, sizes.repeats * sizes.firsts, progress)
    ratios = [there / here for here, there in zip(series[0].rates, series[1].rates, strict=True)]
    rates = [
        {"engine": one.engine, **spread(one.rates), "ratio": round(ratio, 3)}
        for one, ratio in zip(series, (1.0, statistics.median(ratios)), strict=True)
    ]
    return rates, firsts


def first_tokens(engine: Engine, address: str, times: int, progress: Progress) -> list[dict[str, Any]]:
    """Return medians of the time to first token of one request at a time, in this process and over a server."""
    here, there = list[float](), list[float]()
    with Client(address) as client:
        client.ping()
        for number in range(times):
            progress("first tokens", number, times)
            # No two prompts begin alike: none is found in a cache of prefixes.
            prompt = [_FIRST_IDS[number], *_FIRST_IDS[number : number + _FIRST_PROMPT - 1]]
            here.append(_first_here(engine, prompt))
            there.append(_first_there(client, prompt))
    medians = statistics.median(here), statistics.median(there)
    return [
        {"engine": name, "ttft_s": round(median, 6), "over_s": round(median - medians[0], 6)}
        for name, median in zip((IN_PROCESS, SERVED), medians, strict=True)
    ]


_FIRST = SamplingParams(max_tokens=_FIRST_ANSWER, temperature=0, ignore_eos=True)


def _first_here(engine: Engine, prompt: list[int]) -> float:
    begun, first = time.perf_counter(), None
    engine.add(Request(request_id="first", prompt=prompt, params=_FIRST))
    while engine.has_work:
        if engine.step() and first is None:
            first = time.perf_counter()
    assert first is not None
    return first - begun


def _first_there(client: Client, prompt: list[int]) -> float:
    begun = time.perf_counter()
    stream = client.stream(prompt, _FIRST)
    next(stream)
    first = time.perf_counter()
    for _ in stream:
        pass
    return first - begun


# --- neighbours -------------------------------------------------------------------------------------------------------


@define(eq=False)
class Neighbour:
    """A client that reads a stream all the time, and counts its tokens."""

    client: Client
    count: int = field(default=0, init=False)
    _thread: threading.Thread = field(init=False)
    _stopping: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        params = SamplingParams(max_tokens=8000, temperature=0, ignore_eos=True)
        while not self._stopping:
            with self.client.stream([1], params) as stream:
                for output in stream:
                    self.count += len(output.token_ids)
                    if self._stopping:
                        break

    def rate(self, wait: Callable[[], object]) -> float:
        """Return its tokens a second while something takes its time."""
        begun, count = time.perf_counter(), self.count
        wait()
        return (self.count - count) / (time.perf_counter() - begun)

    def close(self) -> None:
        """Stop reading."""
        self._stopping = True
        self._thread.join()


def neighbour_rates(sizes: Sizes, progress: Progress) -> list[dict[str, Any]]:
    """Return a client's tokens a second alone, beside a client that is stopped, and beside many that come and go.

    Its model has steps of a fixed length, so that only serving can slow it down. `ratio` is to the same repeat's
    rate alone, the median; `worst_ratio` the least of them.
    """
    rates: dict[str, list[float]] = {"alone": [], "a client is stopped": [], "clients come and go": []}
    alone, stopped, crowded = rates.values()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(ServedEngine.scripted(streams=64, step_s=sizes.step_s)))
        client = stack.enter_context(Client(server.address))
        neighbour = stack.enter_context(contextlib.closing(Neighbour(client)))
        for repeat in range(sizes.repeats):
            progress("a neighbour", repeat, sizes.repeats)
            time.sleep(SETTLE_S)
            alone.append(neighbour.rate(partial(time.sleep, sizes.seconds)))
            with _visitor(server, "stays") as visitor:
                visitor.process.send_signal(signal.SIGSTOP)
                stopped.append(neighbour.rate(partial(time.sleep, sizes.seconds)))
                visitor.process.send_signal(signal.SIGKILL)
            with _visitor(server, str(sizes.visits)) as crowd:
                crowded.append(neighbour.rate(partial(_all_visits, crowd)))
    return [
        {
            "beside": name,
            **spread(found),
            "ratio": round(statistics.median(ratios), 3),
            "worst_ratio": round(min(ratios), 3),
        }
        for name, found in rates.items()
        if (ratios := [own / calm for own, calm in zip(found, alone, strict=True)])
    ]


@contextlib.contextmanager
def _visitor(server: ServedEngine, what: str) -> Iterator[Child]:
    child = Child.start(["-m", "intarsia_bench.visitors", server.address, what])
    with contextlib.closing(child):
        child.hear("ready")
        yield child


def _all_visits(crowd: Child) -> None:
    crowd.say()
    crowd.hear("done")
