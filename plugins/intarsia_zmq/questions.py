"""Questions that the engine answers between its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from attrs import define, field, frozen

from intarsia.errors import InvalidRequestError, OverloadedError
from intarsia.protocols import EngineHandle
from intarsia.types import Chat
from intarsia_zmq.handover import Ask, Loop
from intarsia_zmq.logprobs import write_ids
from intarsia_zmq.requests import read_chat
from intarsia_zmq.verbs import checked
from intarsia_zmq.wire import Message

#: When to come again, where nothing tells how long what is there will take.
RETRY_S = 1.0

#: Asked on the engine's thread; returns the answer's body.
Question: TypeAlias = Callable[[EngineHandle], Mapping[str, Any]]


@frozen
class Asked:
    """Whose question it is, and what an answer to it is called."""

    connection: bytes
    client: int
    request_id: str
    kind: str


@define(eq=False, kw_only=True)
class Questions:
    """Those that wait. One thread calls it.

    Attributes:
        loop: what answers requests.
        of_client: how many of one client may wait.
        waiting_bytes: of all that waits for the engine, requests too.
    """

    loop: Loop
    of_client: int = 16
    waiting_bytes: int = 256 << 20
    #: client -> how many of its wait
    _waiting: Counter[int] = field(factory=Counter, init=False)

    def ask(self, asked: Asked, question: Question, num_bytes: int, message: Message) -> None:
        """Hand a question and its message on; an `Answered` with `asked` as its tag follows.

        Raises:
            OverloadedError: as many wait as may.
        """
        if self._waiting[asked.client] >= self.of_client:
            raise OverloadedError(f"{self.of_client} questions of yours wait, as many as may", retry_after_s=RETRY_S)
        self.check_room(num_bytes)
        self._waiting[asked.client] += 1
        self.loop.post(Ask(asked, question, num_bytes, message))

    def answered(self, asked: Asked) -> None:
        """One waits no more."""
        left = self._waiting[asked.client] - 1
        if left > 0:
            self._waiting[asked.client] = left
        else:
            del self._waiting[asked.client]

    def check_room(self, num_bytes: int) -> None:
        """Refuse what would have too much wait for the engine.

        Raises:
            OverloadedError: it would.
        """
        if self.loop.waiting_bytes + num_bytes > self.waiting_bytes:
            raise OverloadedError("as many bytes wait for the engine as may", retry_after_s=RETRY_S)


def read_tokenize(message: Message) -> Question:
    """Return what a `tokenize` asks.

    Raises:
        InvalidRequestError: a field is wrong.
    """
    body = checked("tokenize", message.body)
    if ("text" in body) == ("messages" in body):
        raise InvalidRequestError("text: give either a text or messages", field="text")
    prompt: str | Chat = body["text"] if "text" in body else read_chat({"messages": body["messages"]})
    return lambda engine: {"token_ids": write_ids(engine.tokenize(prompt))}


def read_detokenize(message: Message) -> Question:
    """Return what a `detokenize` asks.

    Raises:
        InvalidRequestError: a field is wrong.
    """
    body = checked("detokenize", message.body)
    ids, skip = list(body["token_ids"]), body.get("skip_special_tokens", True)
    return lambda engine: {"text": engine.detokenize(ids, skip_special_tokens=skip)}


def ask_stats(engine: EngineHandle) -> Mapping[str, Any]:
    """Return the engine's figures."""
    return {"engine": dict(engine.stats())}
