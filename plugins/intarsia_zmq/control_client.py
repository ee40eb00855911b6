"""Asking a server's control socket: one question, one answer, no session."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import zmq
from attrs import frozen

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


@frozen
class ControlClient:
    """Looks after a server by its control socket. Each call connects, asks and returns the body of the answer.

    Attributes:
        address: of the control socket.
        timeout_s: how long each call waits.

    Raises:
        ConfigError: the address is none.
        ConnectionLostError: no answer within the time.
        IntarsiaError: the server refuses; its subclass says why.
    """

    address: str
    timeout_s: float = 10.0

    def status(self) -> dict[str, Any]:
        """Return the server's state and figures."""
        return self._ask("status")

    def drain(self) -> dict[str, Any]:
        """Have it take no new requests."""
        return self._ask("drain")

    def pause(self) -> dict[str, Any]:
        """Have it begin no step."""
        return self._ask("pause")

    def resume(self) -> dict[str, Any]:
        """End a pause or a drain."""
        return self._ask("resume")

    def shutdown(self, *, now: bool = False) -> dict[str, Any]:
        """Have it drain and end, or end at once."""
        return self._ask("shutdown", {"now": now})

    def reload(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Reread keys, and change options of the frontend; return which were applied, and which need a restart."""
        return self._ask("reload", {"options": options or {}})

    def swap(self, slot: str, use: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Replace a part of the engine while requests run; return what was done, see `Engine.swap`."""
        return self._ask("swap", {"slot": slot, "use": use, "options": options or {}})

    def _ask(self, kind: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return ask_control(self.address, kind, body, timeout_s=self.timeout_s)


@frozen
class AsyncControlClient:
    """`ControlClient` for the tasks of an event loop: each call waits in a thread."""

    address: str
    timeout_s: float = 10.0

    async def status(self) -> dict[str, Any]:
        """Return the server's state and figures."""
        return await self._call("status")

    async def drain(self) -> dict[str, Any]:
        """Have it take no new requests."""
        return await self._call("drain")

    async def pause(self) -> dict[str, Any]:
        """Have it begin no step."""
        return await self._call("pause")

    async def resume(self) -> dict[str, Any]:
        """End a pause or a drain."""
        return await self._call("resume")

    async def shutdown(self, *, now: bool = False) -> dict[str, Any]:
        """Have it drain and end, or end at once."""
        return await self._call("shutdown", now=now)

    async def reload(self, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Reread keys, and change options of the frontend; return which were applied, and which need a restart."""
        return await self._call("reload", options=options)

    async def swap(self, slot: str, use: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Replace a part of the engine while requests run; return what was done, see `Engine.swap`."""
        return await self._call("swap", slot=slot, use=use, options=options)

    async def _call(self, name: str, **arguments: Any) -> dict[str, Any]:
        call = getattr(ControlClient(self.address, self.timeout_s), name)
        answer: dict[str, Any] = await asyncio.to_thread(call, **arguments)
        return answer


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
