"""How a frontend's contract runs it: in a thread, over a real engine of a tiny model, with clients of its author's."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from attrs import define, field

from intarsia.config import load_config
from intarsia.protocols import EngineHandle, Frontend, FrontendContext
from intarsia.testing.claims import settle
from intarsia.testing.leftovers import calling
from intarsia.testing.watched_engine import WatchedEngine, answered, engine_sections, forget_engine
from intarsia.types import Completion, Output, Provider, SamplingParams

__all__ = ["Asked", "FrontendCase", "FrontendClient", "OutputStream", "Served", "free_port"]

T = TypeVar("T")


class OutputStream(Iterator[Output], Protocol):
    """The outputs of one request as they come. What is wrong with the request, the first `next` may raise."""

    def close(self) -> None:
        """Cancel the request where it has not ended."""
        ...


class FrontendClient(Protocol):
    """A client of a frontend, as its author hands it to the suite. Threads do not share one."""

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> Completion:
        """Answer a prompt of token ids; raise an IntarsiaError that says what the server says is wrong."""
        ...

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> OutputStream:
        """Answer a prompt as it comes."""
        ...

    def close(self) -> None:
        """Take leave."""
        ...

    def vanish(self) -> None:
        """Be gone without a word, as a process that is killed, or a machine that is cut off."""
        ...


def free_port() -> int:
    """Return a port of this machine's own that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


class Asked(Generic[T]):
    """A call that runs in a thread."""

    def __init__(self, call: Callable[[], T], what: str, patience_s: float) -> None:
        self._call, self._what, self._patience_s = call, what, patience_s
        self._found: list[T] = []
        self._raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="suite-asks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:
            self._raised.append(error)

    def result(self) -> T:
        """Return what the call returns, or raise what it raises; AssertionError where neither comes in time."""
        self._thread.join(self._patience_s)
        assert not self._thread.is_alive(), f"{self._what} has not come to an end after {self._patience_s} s"
        if self._raised:
            raise self._raised[0]
        return self._found[0]


@define(eq=False)
class Served:
    """A frontend that serves in a thread.

    Attributes:
        engine: None until it has started.
        error: what `serve` raised; None while it runs, or where it ended well.
    """

    pace_s: float
    failure: Exception | None
    frontend: Frontend = field(init=False)
    engine: WatchedEngine | None = field(default=None, init=False)
    error: BaseException | None = field(default=None, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start_engine(self) -> EngineHandle:
        """Make the engine, as the frontend asks for it; or raise what the claim wants."""
        if self.failure is not None:
            raise self.failure
        self.engine = WatchedEngine(self.pace_s)
        return self.engine

    def start(self) -> None:
        """Begin to serve."""
        self._thread = threading.Thread(target=self._serve, name="suite-serves", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self.frontend.serve()
        except BaseException as error:
            self.error = error

    @property
    def serves(self) -> bool:
        """Whether `serve` has not returned."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of `serve`; raise AssertionError where it does not come."""
        assert self._thread is not None
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"`serve` has not returned after {timeout_s} s"


class FrontendCase:
    """A frontend on trial: subclasses say whose provider it is, where it listens, and how clients reach it.

    Attributes:
        options: the frontend's own, as a config has them.
        crowded: options under which it takes few requests at a time, for the claim that it refuses more. The engine's
            own queue is short: a frontend that hands all requests on needs none.
        patience_s: how long anything may take that must come about.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    crowded: ClassVar[Mapping[str, Any]] = {}
    patience_s: ClassVar[float] = 10.0

    def provider(self) -> Provider:
        """Return the frontend's provider."""
        raise NotImplementedError("provider() must return the frontend's provider")

    def places(self, folder: Path) -> Mapping[str, Any]:
        """Return options that make it listen where nothing else does: `free_port()`, or a socket in this folder."""
        del folder
        raise NotImplementedError(
            "places(folder) must return the options of a free address, such as {'port': free_port()}"
        )

    def connect(self, frontend: Frontend) -> FrontendClient:
        """Return a client of a frontend that serves, or will soon; what it raises meanwhile is tried again."""
        raise NotImplementedError("connect(frontend) must return a FrontendClient: generate, stream, close and vanish")

    def drain(self, frontend: Frontend) -> None:
        """Tell a frontend to finish what runs and end; once this returns, it takes nothing new."""
        raise NotImplementedError("drain(frontend) must tell it to finish what runs and end, as a signal would")

    def endpoint(self, frontend: Frontend) -> tuple[str, int] | Path | None:
        """Return host and port, or the file, of its socket, for bytes that are no message; None where it has none."""
        del frontend
        return None

    def exposed(self) -> Mapping[str, Any] | None:
        """Return options that would have it listen beyond this machine, unprotected, and that it refuses; or None."""
        return None

    # --- what claims are made of ------------------------------------------------------------------------------------

    def build(self, options: Mapping[str, Any], start_engine: Callable[[], EngineHandle]) -> Frontend:
        """Return a frontend of these options."""
        provider, config = self.provider(), load_config(engine_sections())
        settled = settle(provider, "frontend", {**self.options, **options})
        context = FrontendContext(options=settled, engine=config.engine, config=config, start_engine=start_engine)
        frontend: Frontend = provider.build(context)
        return frontend

    @contextmanager
    def placed(self) -> Iterator[Mapping[str, Any]]:
        """Return options of a free address, and keep the folder that it may be in."""
        with tempfile.TemporaryDirectory(prefix="intarsia-", ignore_cleanup_errors=True) as folder:
            yield self.places(Path(folder))

    @contextmanager
    def serving(
        self,
        *,
        pace_s: float = 0.0,
        failure: Exception | None = None,
        places: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Served]:
        """Serve an engine; drain at the end, unless the claim has ended it. Nothing of a request may be left then."""
        with self.placed() if places is None else nullcontext(places) as where:
            served = Served(pace_s, failure)
            served.frontend = self.build({**where, **options}, served.start_engine)
            served.start()
            try:
                yield served
                self._end(served)
            except BaseException:
                self._give_up(served)
                raise

    def _give_up(self, served: Served) -> None:
        """End what failed a claim, as far as that is possible, and use nothing of it again."""
        forget_engine()
        if served.engine is not None:
            served.engine.may_step.set()
        if served.serves:
            with suppress(Exception):
                self.drain(served.frontend)

    def _end(self, served: Served) -> None:
        if served.engine is not None:
            served.engine.may_step.set()
            if served.serves:
                self.wait_until(lambda: not self.engine(served).live, "a request is left in the engine")
        if served.serves:
            self.drain(served.frontend)
            served.join(self.patience_s)
            assert served.error is None, f"`serve` raised {served.error!r}"
        if served.engine is not None:
            assert served.engine.closed, "the frontend has ended, and has not closed its engine"

    def engine(self, served: Served) -> WatchedEngine:
        """Return the engine, once it has started."""
        self.wait_until(lambda: served.engine is not None, "the engine has not been started")
        assert served.engine is not None
        return served.engine

    @contextmanager
    def client(self, served: Served) -> Iterator[FrontendClient]:
        """Connect, and take leave."""
        made = self._connect(served)
        try:
            yield made
        finally:
            made.close()

    def _connect(self, served: Served) -> FrontendClient:
        until = time.monotonic() + self.patience_s
        while True:
            try:
                return self.connect(served.frontend)
            except NotImplementedError:
                raise
            except Exception as error:
                assert served.error is None, f"`serve` raised {served.error!r}"
                assert time.monotonic() < until, f"no client can connect: {type(error).__name__}: {error}"
                time.sleep(0.05)

    def wait_until(self, check: Callable[[], bool], otherwise: str) -> None:
        """Wait until something is so; AssertionError where it does not come about in `patience_s`."""
        until = time.monotonic() + self.patience_s
        while not check():
            assert time.monotonic() < until, f"after {self.patience_s} s {otherwise}"
            time.sleep(0.005)

    def asking(self, call: Callable[[], T], what: str) -> Asked[T]:
        """Begin a call in a thread of its own."""
        return Asked(call, what, self.patience_s)

    def in_time(self, call: Callable[[], T], what: str) -> T:
        """Return what a call returns that must end well, and in `patience_s`; AssertionError where it does not."""
        with calling(what):
            return self.asking(call, what).result()

    def check(self, prompt: Sequence[int], params: SamplingParams, found: Completion) -> None:
        """Raise AssertionError unless an answer is the engine's own."""
        wanted = answered(prompt, params)
        for name in ("prompt_token_ids", "seed", "text"):
            assert getattr(found, name) == getattr(wanted, name), (
                f"{name} is {getattr(found, name)!r:.80}, and the engine's {getattr(wanted, name)!r:.80}"
            )
        counts = [(c.usage.prompt_tokens, c.usage.completion_tokens) for c in (found, wanted)]
        assert counts[0] == counts[1], f"tokens are counted as {counts[0]}, and by the engine as {counts[1]}"
        said, right = ([(c.token_ids, c.finish_reason) for c in each.choices] for each in (found, wanted))
        assert said == right, f"the answer is {said}, and the engine's {right}"
        scores, theirs = ([_values(c.logprobs) for c in each.choices] for each in (found, wanted))
        assert scores == theirs, "log-probabilities are not the engine's"
        assert _values(found.prompt_logprobs) == _values(wanted.prompt_logprobs), "the prompt's scores are not its own"


def _values(entries: Sequence[Any] | None) -> Any:
    """Return log-probabilities as far as chunks and batches leave them."""
    if not entries:
        return None
    return [entry and (entry.token_id, round(entry.logprob, 3), len(entry.top)) for entry in entries]
