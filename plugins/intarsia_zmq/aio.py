"""A client for programs with an asyncio event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

from attrs import define, field

from intarsia.errors import IntarsiaError
from intarsia.types import Completion, Message, Output, Prompt, Request, SamplingParams
from intarsia_zmq.answers import Answer, Asking, Gathering, Pong, is_one
from intarsia_zmq.calls import Call, Event, Events
from intarsia_zmq.client import DEFAULT_ADDRESS
from intarsia_zmq.link import Address, link
from intarsia_zmq.logprobs import write_ids
from intarsia_zmq.requests import Generate


@define(eq=False)
class _Inbox:
    """What has come for one request, and who waits for more; the event loop's thread alone touches it."""

    arrived: list[tuple[str, list[Event]]] = field(factory=list)
    waiter: asyncio.Future[None] | None = None

    def put(self, name: str, events: list[Event]) -> None:
        self.arrived.append((name, events))
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> list[tuple[str, list[Event]]]:
        """Return what has come, at least one: (request id, its events)."""
        while not self.arrived:
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None
        arrived, self.arrived = self.arrived, []
        return arrived


class AsyncClient:
    """A client of an Intarsia server, for the tasks of one event loop. Made and used within it.

    As `Client`, whose arguments it takes: a thread of its own keeps the connection, so that heartbeats go on while the
    event loop is busy. A task that is cancelled while it waits cancels its request.

    Raises:
        ConfigError: an argument is wrong.
        RuntimeError: no event loop is running.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        server_key: str | Path | None = None,
        key: str | Path | None = None,
        timeout_s: float = 30.0,
        credit: int | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._inboxes: dict[str, _Inbox] = {}
        #: what the link's thread has brought and the loop has not yet taken
        self._arrived: deque[Events] = deque()
        self._scheduled = False
        self._link = link(Address.of(address, server_key, key), timeout_s, credit, self._arrive)
        self._asking = Asking(self._link, credit)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session; the server cancels what is in flight. Calls that wait raise. Safe to call twice."""
        await asyncio.to_thread(self._link.close)

    # --- generating ---------------------------------------------------------------------------------------------------

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Completion: ...

    @overload
    async def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Completion | list[Completion]:
        """Answer a prompt; or prompts, at once and in their order. Args and errors are those of `Client.generate`."""
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "deadline_s": deadline_s}
        asked = self._asking.many(prompt, params, **options)
        gathering, inbox = Gathering(self._asking), _Inbox()
        try:
            for each in asked:
                gathering.add(each.request)
                self._start(each, inbox)
            while not gathering.ended:
                for name, said in await inbox.get():
                    gathering.take(name, said)
        finally:
            for name in gathering.names:
                self._inboxes.pop(name, None)
            gathering.cancel()
        made = gathering.completions()
        return made[0] if is_one(prompt) else made

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> AsyncOutputStream:
        """Answer one prompt as it comes: `async for output in client.stream(...)`; see `Client.stream`."""
        asked = self._asking.one(
            prompt, params, stream=True, priority=priority, cache_salt=cache_salt, deadline_s=deadline_s
        )
        inbox = _Inbox()
        self._start(asked, inbox)
        return AsyncOutputStream(self._asking, asked.request, self._inboxes, inbox)

    # --- asking -------------------------------------------------------------------------------------------------------

    async def tokenize(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a text or of a chat's messages."""
        body = {"text": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return list((await self._ask("tokenize", body))["token_ids"])

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        body = {"token_ids": write_ids(token_ids), "skip_special_tokens": skip_special_tokens}
        return str((await self._ask("detokenize", body))["text"])

    async def models(self) -> list[dict[str, Any]]:
        """Return what the server serves: name, family, vocab_size, max_model_len, chat."""
        return list((await self._ask("models", {})).get("models", ()))

    async def explain(self) -> dict[str, Any]:
        """Return what the server's engine is made of and why."""
        return dict(await self._ask("explain", {}))

    async def stats(self) -> dict[str, Any]:
        """Return the figures of the engine and of the server."""
        return dict(await self._ask("stats", {}))

    async def ping(self) -> Pong:
        """Ask how the server is; it answers in the middle of a step, too."""
        asked_at = time.monotonic()
        body = await self._ask("ping", {})
        return Pong(body["state"], body.get("step_age_s"), time.monotonic() - asked_at)

    # --- within -------------------------------------------------------------------------------------------------------

    def _arrive(self, events: Events) -> None:
        """Called by the link's thread."""
        self._arrived.append(events)
        if not self._scheduled:
            self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

    def _deliver(self) -> None:
        # Before anything is taken: what arrives from here on is taken below, or wakes the loop again.
        self._scheduled = False
        arrived, inboxes = self._arrived, self._inboxes
        while arrived:
            for name, said in arrived.popleft().items():
                inbox = inboxes.get(name)
                if inbox is not None:
                    inbox.put(name, said)

    def _start(self, asked: Generate, inbox: _Inbox) -> None:
        name = asked.request.request_id
        call = Call.of(asked, time.monotonic())
        self._inboxes[name] = inbox
        try:
            self._link.post(self._link.connection.start, call)
        except BaseException:
            self._inboxes.pop(name, None)
            raise

    async def _ask(self, kind: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        name = self._link.new_name()
        question = self._link.connection.question(kind, name, body)
        inbox = self._inboxes[name] = _Inbox()
        try:
            self._link.post(self._link.connection.ask, name, question)
            ((_, (event,)),) = await inbox.get()
        except BaseException:
            self._link.tell(self._link.connection.cancel, name)
            raise
        finally:
            self._inboxes.pop(name, None)
        if isinstance(event, IntarsiaError):
            raise event
        assert isinstance(event, Mapping)
        return event


@define(eq=False)
class AsyncOutputStream:
    """The outputs of one request, as they come: an async iterator, to be closed or used as an async context manager."""

    _asking: Asking
    _request: Request
    _inboxes: dict[str, _Inbox]
    _inbox: _Inbox
    _answer: Answer = field(init=False)
    _ready: deque[Output] = field(factory=deque, init=False)
    #: of how many of its deltas the connection knows that they were read
    _told: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self._answer = Answer(self._request)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._request.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        ready = self._ready
        while not ready:
            if self._closed:
                raise StopAsyncIteration
            if self._answer.ended:
                self.close()
                if self._answer.failure is not None:
                    raise self._answer.failure
                raise StopAsyncIteration
            try:
                await self._receive()
            except asyncio.CancelledError:
                self.close()
                raise
        return ready.popleft()

    def close(self) -> None:
        """Cancel what is not finished. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        self._inboxes.pop(self.request_id, None)
        if not self._answer.ended:
            self._asking.cancelled(self.request_id)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    async def _receive(self) -> None:
        """Wait for more. What was read before may be followed by as much again; said now and then, not each time."""
        answer = self._answer
        if answer.deltas - self._told >= self._asking.step:
            self._asking.took(self.request_id, answer.deltas - self._told)
            self._told = answer.deltas
        for _, said in await self._inbox.get():
            self._ready.extend(answer.take(said))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
