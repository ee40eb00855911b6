"""Errors over the wire: the codes of docs/wire-protocol.md, typed on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.errors import (
    CompositionError,
    ConfigError,
    ExecutionError,
    IntarsiaError,
    InvalidRequestError,
    OverloadedError,
    PluginError,
)

#: Longer messages are cut: a value that is quoted may be as long as a message.
_MAX_TEXT = 1000
#: For a client, where an overloaded server gives no hint.
_RETRY_AFTER_S = 1.0


class MalformedError(IntarsiaError):
    """Bytes that are no message."""

    code = "malformed"


class UnsupportedError(IntarsiaError):
    """A protocol version or a kind of message that the other side does not know."""

    code = "unsupported"


class NoSessionError(IntarsiaError):
    """A message before `hello`, or after the session ended."""

    code = "no_session"


class DrainingError(IntarsiaError):
    """The server takes no new requests."""

    code = "draining"


class SlowReaderError(IntarsiaError):
    """The client took what a request has to say too slowly."""

    code = "slow_reader"


class InternalError(IntarsiaError):
    """A fault of the server's own, or one with a code that this client does not know."""

    code = "internal"


#: Every code that an `error` message can have, and what it is raised as.
CODES: Mapping[str, type[IntarsiaError]] = {
    kind.code: kind
    for kind in (
        MalformedError,
        UnsupportedError,
        NoSessionError,
        InvalidRequestError,
        OverloadedError,
        DrainingError,
        SlowReaderError,
        ExecutionError,
        ConfigError,
        CompositionError,
        PluginError,
        InternalError,
    )
}


def write_error(error: BaseException) -> dict[str, Any]:
    """Return the body of `error`. What is no IntarsiaError says nothing of itself: it may hold others' data."""
    if not isinstance(error, IntarsiaError):
        error = InternalError("a fault of the server's own; its log says more")
    retry = error.retry_after_s if isinstance(error, OverloadedError) else None
    return {
        "code": error.code if error.code in CODES else InternalError.code,
        "field": None if error.field is None else _cut(error.field),
        "message": _cut(str(error)),
        "retry_after_s": retry,
    }


def read_error(body: Mapping[str, Any]) -> IntarsiaError:
    """Return the error that a body of `error` stands for."""
    code, where, text = body.get("code"), body.get("field"), body.get("message")
    message = text if isinstance(text, str) else f"{code}"
    path = where if isinstance(where, str) else None
    kind = CODES.get(code) if isinstance(code, str) else None
    if kind is OverloadedError:
        retry = body.get("retry_after_s")
        return OverloadedError(
            message, retry_after_s=float(retry) if isinstance(retry, int | float) else _RETRY_AFTER_S
        )
    return InternalError(f"{code}: {message}", field=path) if kind is None else kind(message, field=path)


def _cut(text: str) -> str:
    text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    # A lone surrogate, which a message may quote, has no UTF-8.
    return text.encode("utf-8", "backslashreplace").decode()
