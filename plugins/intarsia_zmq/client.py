"""A client for programs with threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, overload

from attrs import define, field

from intarsia.errors import IntarsiaError
from intarsia.types import Completion, Message, Output, Prompt, Request, SamplingParams
from intarsia_zmq.answers import Answer, Asking, Gathering, Pong, is_one
from intarsia_zmq.calls import Call, Event, Events
from intarsia_zmq.link import Address, Link, link
from intarsia_zmq.logprobs import write_ids
from intarsia_zmq.requests import Generate

#: (request id, what came for it)
_Inbox = SimpleQueue[tuple[str, list[Event]]]
DEFAULT_ADDRESS = "tcp://127.0.0.1:5555"


class Client:
    """A client of an Intarsia server, for any number of threads at once.

    It owns a thread that keeps the connection: heartbeats go on while nobody calls, and where the connection is cut
    the client returns to its session, so that streams go on without losing or repeating anything.

    Args:
        address: of the server's data socket.
        server_key: the server's public CURVE key, or the file of it; None does not encrypt.
        key: the file of this client's secret CURVE key; one is made up where only `server_key` is given.
        timeout_s: how long a call waits for a server that is out of reach, and a question for its answer. How long
            an answer takes to generate is not bounded by it; see `deadline_s`.
        credit: how many deltas of a stream may wait here for their reader; None is what the server offers. A reader
            that is slower holds up its own stream alone.

    Raises:
        ConfigError: an argument is wrong. Whether the server is there is found out by the first call.
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
        self._inboxes: dict[str, _Inbox] = {}
        self._link: Link = link(Address.of(address, server_key, key), timeout_s, credit, self._deliver)
        self._asking = Asking(self._link, credit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the session; the server cancels what is in flight. Calls that wait raise. Safe to call twice."""
        self._link.close()

    # --- generating ---------------------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> Completion | list[Completion]:
        """Answer a prompt; or prompts, at once and in their order.

        Args:
            prompt: text, token ids, messages or a `Chat`: one `Completion`; a list of those: a list.
            params: one for all, or one a prompt.
            priority: higher first, among this client's own.
            cache_salt: cached prefixes are shared with requests of an equal salt alone.
            deadline_s: seconds after which it ends with what it has; `finish_reason` is then `deadline`.

        Raises:
            InvalidRequestError: it cannot be run as asked.
            OverloadedError: the server's queue is full; `retry_after_s` says when to come again.
            DrainingError: the server takes nothing new.
            ExecutionError: the engine failed.
            ConnectionLostError: the server is out of reach for `timeout_s`, or has forgotten the request.
        """
        options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "deadline_s": deadline_s}
        asked = self._asking.many(prompt, params, **options)
        gathering, inbox = Gathering(self._asking), _Inbox()
        try:
            for each in asked:
                gathering.add(each.request)
                self._start(each, inbox)
            while not gathering.ended:
                gathering.take(*inbox.get())
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
    ) -> OutputStream:
        """Answer one prompt as it comes. Leaving the loop, or closing the stream, cancels the request.

        The last output has `usage`, `timings` and `seed`. What is wrong with the request is raised by the first
        `next`.

        Args and Raises:
            As `generate`.
        """
        asked = self._asking.one(
            prompt, params, stream=True, priority=priority, cache_salt=cache_salt, deadline_s=deadline_s
        )
        inbox = _Inbox()
        self._start(asked, inbox)
        return OutputStream(self._asking, asked.request, self._inboxes, inbox)

    # --- asking -------------------------------------------------------------------------------------------------------

    def tokenize(self, prompt: str | Sequence[Message]) -> list[int]:
        """Return the token ids of a text or of a chat's messages."""
        body = {"text": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return list(self._ask("tokenize", body)["token_ids"])

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        body = {"token_ids": write_ids(token_ids), "skip_special_tokens": skip_special_tokens}
        return str(self._ask("detokenize", body)["text"])

    def models(self) -> list[dict[str, Any]]:
        """Return what the server serves: name, family, vocab_size, max_model_len, chat."""
        return list(self._ask("models", {}).get("models", ()))

    def explain(self) -> dict[str, Any]:
        """Return what the server's engine is made of and why."""
        return dict(self._ask("explain", {}))

    def stats(self) -> dict[str, Any]:
        """Return the figures of the engine and of the server."""
        return dict(self._ask("stats", {}))

    def ping(self) -> Pong:
        """Ask how the server is; it answers in the middle of a step, too."""
        asked_at = time.monotonic()
        body = self._ask("ping", {})
        return Pong(body["state"], body.get("step_age_s"), time.monotonic() - asked_at)

    # --- within -------------------------------------------------------------------------------------------------------

    def _deliver(self, events: Events) -> None:
        """Called by the link's thread."""
        inboxes = self._inboxes
        for name, said in events.items():
            inbox = inboxes.get(name)
            if inbox is not None:
                inbox.put((name, said))

    def _start(self, asked: Generate, inbox: _Inbox) -> None:
        name = asked.request.request_id
        call = Call.of(asked, time.monotonic())
        self._inboxes[name] = inbox
        try:
            self._link.post(self._link.connection.start, call)
        except BaseException:
            self._inboxes.pop(name, None)
            raise

    def _ask(self, kind: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        name = self._link.new_name()
        question = self._link.connection.question(kind, name, body)
        inbox = self._inboxes[name] = _Inbox()
        try:
            self._link.post(self._link.connection.ask, name, question)
            _, (event,) = inbox.get()
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
class OutputStream:
    """The outputs of one request, as they come: an iterator, to be closed or used as a context manager.

    One thread at a time reads it.
    """

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

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        ready = self._ready
        while not ready:
            if self._closed:
                raise StopIteration
            if self._answer.ended:
                self.close()
                if self._answer.failure is not None:
                    raise self._answer.failure
                raise StopIteration
            self._receive()
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

    def _receive(self) -> None:
        """Wait for more. What was read before may be followed by as much again; said now and then, not each time."""
        answer = self._answer
        if answer.deltas - self._told >= self._asking.step:
            self._asking.took(self.request_id, answer.deltas - self._told)
            self._told = answer.deltas
        self._ready.extend(answer.take(self._inbox.get()[1]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
