"""Intarsia over ZeroMQ: messages, sessions, fair admission. docs/wire-protocol.md says what goes over the wire."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from intarsia.hookspecs import hookimpl
from intarsia.types import Fit, Provider, lazy
from intarsia_zmq.options import ZmqOptions

if TYPE_CHECKING:
    from intarsia_zmq.aio import AsyncClient as AsyncClient
    from intarsia_zmq.client import Client as Client
    from intarsia_zmq.control_client import AsyncControlClient as AsyncControlClient
    from intarsia_zmq.control_client import ControlClient as ControlClient

#: Where the clients are; they are imported when they are asked for.
_CLIENTS = {
    "Client": "client",
    "AsyncClient": "aio",
    "ControlClient": "control_client",
    "AsyncControlClient": "control_client",
}


def __getattr__(name: str) -> Any:
    module = _CLIENTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)


@hookimpl
def provide_frontends() -> list[Provider]:
    """The server."""
    return [
        Provider(
            key="zmq",
            summary="msgpack over ZeroMQ: many clients at once, fair, resumable, with keys beyond this machine",
            options=ZmqOptions,
            fit=lambda _: Fit(50, "serves clients in any language"),
            build=lazy("intarsia_zmq.frontend:build"),
        )
    ]


@hookimpl
def provide_commands() -> list[Provider]:
    """Commands around a server."""
    summaries = {
        "client": "Have a server answer a prompt.",
        "health": "Tell whether a server is alive and ready.",
        "control": "Look after a server on this machine: status, drain, pause, resume, reload, shutdown.",
        "swap": "Replace a part of a running server's engine; no request is lost.",
        "live": "Show what a running server's engine is made of, what was swapped, and where its time goes.",
        "keygen": "Make CURVE key pairs for a server and its clients.",
    }
    route = "Serve at one address what several servers do, and look after these."
    return [
        *(
            Provider(key=key, summary=summary, build=lazy(f"intarsia_zmq.commands:build_{key}"))
            for key, summary in summaries.items()
        ),
        Provider(key="route", summary=route, build=lazy("intarsia_zmq.routing.command:build")),
    ]
