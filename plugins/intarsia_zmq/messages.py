"""Bodies of messages, and the values that they are: greetings and answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
from attrs import field, frozen

from intarsia.errors import InvalidRequestError
from intarsia.types import CompletionChoice, FinishReason, Output, Timings, TokenLogprobs, Usage
from intarsia_zmq.errors import MalformedError, UnsupportedError, write_error
from intarsia_zmq.limits import ServerLimits
from intarsia_zmq.logprobs import read_logprobs, write_ids, write_logprobs
from intarsia_zmq.verbs import checked, wrong
from intarsia_zmq.wire import VERSION, Message

TOKEN_BYTES = 32


@frozen(kw_only=True)
class Hello:
    """How a client begins: who it is, and which session it returns to.

    Attributes:
        client: name and version, for logs.
        token: of the session to resume.
        received: request id -> the last `seq` seen of it.
    """

    versions: tuple[int, ...] = (VERSION,)
    client: Mapping[str, str] = field(factory=dict)
    token: bytes | None = None
    received: Mapping[str, int] = field(factory=dict)


@frozen(kw_only=True)
class Served:
    """What a server is, the same for all clients: most of `welcome`.

    Attributes:
        server: name and version.
        model: name, family, vocab_size, max_model_len, chat.
        composition: hash.
    """

    server: Mapping[str, Any]
    model: Mapping[str, Any]
    composition: Mapping[str, Any]
    limits: ServerLimits = field(factory=ServerLimits)
    heartbeat_s: float = 5.0
    grace_s: float = 30.0
    credit: int = 256


@frozen(kw_only=True)
class Welcome:
    """How a server answers a `hello`."""

    served: Served
    token: bytes
    resumed: bool = False
    requests: tuple[str, ...] = ()
    version: int = VERSION


@frozen(kw_only=True)
class Done:
    """The end of a request. Choices have text, ids and log-probabilities only where nothing was streamed.

    Attributes:
        prompt_logprobs: of the prompt's tokens from the second on; None where not asked for, or streamed.
    """

    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timings: Timings
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


# --- greetings --------------------------------------------------------------------------------------------------------


def read_hello(message: Message) -> Hello:
    """Return what a `hello` says.

    Raises:
        UnsupportedError: it offers no version that is spoken here.
        InvalidRequestError: a field is wrong.
    """
    body = checked("hello", message.body)
    if VERSION not in body["versions"]:
        raise UnsupportedError(f"versions: none of those offered is spoken here; {VERSION} is", field="versions")
    token, received, client = body.get("token"), body.get("received", {}), body.get("client", {})
    if token is not None and len(token) != TOKEN_BYTES:
        raise InvalidRequestError(f"token: {len(token)} bytes; a token has {TOKEN_BYTES}", field="token")
    for request_id, seq in received.items():
        if type(seq) is not int or seq < 0:
            raise wrong(f"received.{request_id:.64}", seq, "a sequence number, a whole number from 0")
    named = {key: value[:64] for key, value in client.items() if key in ("name", "version") and type(value) is str}
    versions = tuple(each for each in body["versions"] if type(each) is int)
    return Hello(versions=versions, client=named, token=token, received=received)


def write_hello(hello: Hello) -> Message:
    """Return the message of a client's beginning."""
    body: dict[str, Any] = {"versions": list(hello.versions), "client": dict(hello.client)}
    if hello.token is not None:
        body |= {"token": hello.token, "received": dict(hello.received)}
    return Message("hello", "", 0, body)


def read_welcome(message: Message) -> Welcome:
    """Return what a `welcome` says.

    Raises:
        MalformedError: a field is wrong.
    """
    body = checked("welcome", message.body, MalformedError)
    known = {each.name for each in attrs.fields(ServerLimits)}
    try:
        limits = ServerLimits(**{key: value for key, value in body["limits"].items() if key in known})
    except (TypeError, ValueError) as error:
        raise MalformedError(f"limits: {error}", field="limits") from error
    for name in ("heartbeat_s", "grace_s"):
        if not 0 < body[name] < math.inf:
            raise wrong(name, body[name], "a finite number of seconds above 0", MalformedError)
    if not all(type(request_id) is str for request_id in body["requests"]):
        raise MalformedError("requests: not an array of request ids", field="requests")
    served = Served(
        server=body.get("server", {}),
        model=body["model"],
        composition=body.get("composition", {}),
        limits=limits,
        heartbeat_s=body["heartbeat_s"],
        grace_s=body["grace_s"],
        credit=body["credit"],
    )
    return Welcome(
        served=served,
        token=body["token"],
        resumed=body["resumed"],
        requests=tuple(body["requests"]),
        version=body["version"],
    )


def write_welcome(welcome: Welcome) -> Message:
    """Return the message of a server's answer to `hello`."""
    served = welcome.served
    body = {
        "version": welcome.version,
        "server": dict(served.server),
        "model": dict(served.model),
        "composition": dict(served.composition),
        "limits": attrs.asdict(served.limits),
        "heartbeat_s": served.heartbeat_s,
        "grace_s": served.grace_s,
        "credit": served.credit,
        "token": welcome.token,
        "resumed": welcome.resumed,
        "requests": list(welcome.requests),
    }
    return Message("welcome", "", 0, body)


# --- answers ----------------------------------------------------------------------------------------------------------


def delta_body(
    choice: int,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs] = (),
    prompt_logprobs: Sequence[TokenLogprobs] = (),
    finish_reason: str | None = None,
) -> dict[str, Any]:
    """Return the body of a `delta`; what is empty is left out, but for `choice`."""
    body: dict[str, Any] = {"choice": choice}
    if text:
        body["text"] = text
    if token_ids:
        body["token_ids"] = write_ids(token_ids)
    if logprobs:
        body["logprobs"] = write_logprobs(logprobs)
    if prompt_logprobs:
        body["prompt_logprobs"] = write_logprobs(prompt_logprobs)
    if finish_reason is not None:
        body["finish_reason"] = finish_reason
    return body


def read_delta(message: Message) -> Output:
    """Return a delta as the output that it is. `finish_reason` can be `deadline` as well.

    Raises:
        MalformedError: a field is wrong.
    """
    body = checked("delta", message.body, MalformedError)
    return Output(
        request_id=message.id,
        choice=body.get("choice", 0),
        text=body.get("text", ""),
        token_ids=tuple(body.get("token_ids", ())),
        logprobs=read_logprobs(body.get("logprobs", ()), "logprobs"),
        prompt_logprobs=read_logprobs(body.get("prompt_logprobs", ()), "prompt_logprobs"),
        finish_reason=cast("FinishReason | None", body.get("finish_reason")),
    )


def choice_body(
    index: int,
    finish_reason: str,
    error: str | None,
    whole: tuple[str, Sequence[int], Sequence[TokenLogprobs]] | None = None,
) -> dict[str, Any]:
    """Return one of the `choices` of `done`; `whole` is (text, ids, log-probabilities) where nothing was streamed."""
    body: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
    if error is not None:
        body["error"] = {"code": "execution", "message": error}
    if whole is not None:
        text, token_ids, logprobs = whole
        body |= {"text": text, "token_ids": write_ids(token_ids)}
        if logprobs:
            body["logprobs"] = write_logprobs(logprobs)
    return body


def done_body(
    choices: list[dict[str, Any]],
    usage: Usage,
    timings: Timings,
    seed: int,
    prompt_logprobs: Sequence[TokenLogprobs] = (),
) -> dict[str, Any]:
    """Return the body of `done`."""
    body: dict[str, Any] = {"choices": choices}
    if prompt_logprobs:
        body["prompt_logprobs"] = write_logprobs(prompt_logprobs)
    counts = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    seconds = {"queued_s": timings.queued_s, "first_token_s": timings.first_token_s, "total_s": timings.total_s}
    return body | {"usage": counts, "timings": seconds, "seed": seed}


def read_done(message: Message) -> Done:
    """Return what a `done` says.

    Raises:
        MalformedError: a field is wrong.
    """
    body = checked("done", message.body, MalformedError)
    try:
        usage = Usage(**{each.name: int(body["usage"].get(each.name, 0)) for each in attrs.fields(Usage)})
        timings = Timings(**{each.name: float(body["timings"].get(each.name, 0)) for each in attrs.fields(Timings)})
        choices = tuple(_read_choice(each) for each in sorted(body["choices"], key=lambda each: each["index"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedError(f"done: {type(error).__name__}: {error}") from error
    scored = body.get("prompt_logprobs")
    prompt = None if scored is None else read_logprobs(scored, "prompt_logprobs")
    return Done(choices=choices, usage=usage, timings=timings, seed=body["seed"], prompt_logprobs=prompt)


def _read_choice(said: Mapping[str, Any]) -> CompletionChoice:
    error, logprobs = said.get("error"), said.get("logprobs")
    return CompletionChoice(
        text=said.get("text", ""),
        token_ids=tuple(said.get("token_ids", ())),
        finish_reason=cast("FinishReason", said["finish_reason"]),
        logprobs=None if logprobs is None else read_logprobs(logprobs, "logprobs"),
        error=None if error is None else str(error["message"]),
    )


def error_message(error: BaseException, request_id: str = "") -> Message:
    """Return the `error` that refuses the request of this id, or with "" answers a message."""
    return Message("error", request_id, 0, write_error(error))


def read_credit(message: Message) -> tuple[int, int]:
    """Return (received, upto) of a `credit`; 0 where it says neither.

    Raises:
        InvalidRequestError: a field is wrong.
    """
    body = checked("credit", message.body)
    return body.get("received", 0), body.get("upto", 0)
