"""Asking a server's control socket: one question, one answer, no session."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq

from intarsia.errors import ConfigError
from intarsia_zmq.calls import ConnectionLostError
from intarsia_zmq.errors import MalformedError, read_error
from intarsia_zmq.limits import CLIENT_LIMITS
from intarsia_zmq.wire import Message, decode, encode

_ID = "1"


def default_control(port: str = "5555") -> str:
    """Return where a server that listens on this port is controlled, unless its config says otherwise.

    Raises:
        ConfigError: this user has no folder for sockets.
    """
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if not folder or not Path(folder).is_dir():
        raise ConfigError(
            "--control: there is no XDG_RUNTIME_DIR, so a server here has no control socket of its own accord; "
            "start it with -o frontend.use=zmq -o frontend.control=ipc://PATH, and give --control ipc://PATH",
            field="control",
        )
    return f"ipc://{folder}/intarsia-{port}.control"


def ask_control(address: str, kind: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> dict[str, Any]:
    """Ask and return the answer's body.

    Raises:
        ConfigError: the address is none.
        ConnectionLostError: no answer within the time.
        IntarsiaError: the server refuses.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    # Where a server has refused this connection there is nowhere to send to, and sending would wait for ever.
    socket.sndtimeo = int(timeout_s * 1000)
    try:
        socket.connect(address)
        socket.send_multipart(encode(Message(kind, _ID, 0, body or {})))
        return _answer(socket, address, timeout_s)
    except zmq.Again:
        raise _unanswered(address, timeout_s) from None
    except zmq.ZMQError as error:
        raise ConfigError(
            f"control: {address!r} is not an address such as ipc:///run/x.control: {error.strerror}", field="control"
        ) from error
    finally:
        socket.close()
        context.term()


def _answer(socket: zmq.Socket[bytes], address: str, timeout_s: float) -> dict[str, Any]:
    until = time.monotonic() + timeout_s
    while (left_s := until - time.monotonic()) > 0:
        if not socket.poll(int(left_s * 1000) + 1):
            break
        try:
            messages = decode(socket.recv_multipart(), CLIENT_LIMITS)
        except MalformedError as error:
            raise ConnectionLostError(f"{address}: it answers with what is no message: {error}") from error
        for message in messages:
            if message.kind == "error":
                raise read_error(message.body)
            if message.id == _ID:
                return dict(message.body)
    raise _unanswered(address, timeout_s)


def _unanswered(address: str, timeout_s: float) -> ConnectionLostError:
    return ConnectionLostError(f"{address}: no answer within {timeout_s:g} s; is a server there?")
