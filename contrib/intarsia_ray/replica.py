"""A replica as a Ray actor: a process of Ray's in which an engine serves its ZeroMQ frontend."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia_zmq.frontend import ZmqFrontend, places_of
from intarsia_zmq.options import ZmqOptions

if TYPE_CHECKING:
    from intarsia.protocols import EngineHandle

log = logging.getLogger("intarsia.ray")


class ServingReplica:
    """Serves one engine until its process ends. Ray makes it, restarts it, and calls `state`.

    Ray pickles what its actors are made of and what they return, between its own processes. So that is plain data here:
    a config and texts. What clients say never comes this way: it goes over the replica's own socket, as msgpack.

    Args:
        config: of the engine, as plain data.
        name: of the model, as clients see it.
        keys: texts of key files: `server` is this server's secret one, `client` the public one of the router.
        near: id of the node where the router is; a replica there listens on loopback alone.
    """

    def __init__(self, config: Mapping[str, Any], name: str, keys: Mapping[str, str], near: str) -> None:
        self._config = dict(config)
        self._error: str | None = None
        self._started = False
        self._folder = tempfile.TemporaryDirectory(prefix="intarsia-ray-")
        folder = Path(self._folder.name)
        (folder / "clients").mkdir(mode=0o700)
        _store(folder / "server.key_secret", keys["server"])
        _store(folder / "clients" / "router.key", keys["client"])
        options = ZmqOptions(
            bind=f"tcp://{_host(near)}:*",
            control="",
            server_key=str(folder / "server.key_secret"),
            client_keys=str(folder / "clients"),
        )
        self._server = ZmqFrontend(options, name, places_of(options), self._start_engine).server()
        threading.Thread(target=self._serve, name="intarsia-serve", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return where it listens, whether its engine has started, and why it serves no more, if it does not."""
        return {"address": self._server.addresses["data"], "started": self._started, "error": self._error}

    def pid(self) -> int:
        """Return the process that it runs in."""
        return os.getpid()

    def _start_engine(self) -> EngineHandle:
        from intarsia.engine import Engine

        engine = Engine.from_config(self._config)
        self._started = True
        return engine

    def _serve(self) -> None:
        try:
            self._server.serve()
            self._error = "it was told to stop"
        except BaseException as error:
            log.exception("the replica serves no more")
            self._error = f"{type(error).__name__}: {error}"


def _host(near: str) -> str:
    """Return the address to listen at: only this machine's where the router is on it."""
    import ray

    if ray.get_runtime_context().get_node_id() == near:
        return "127.0.0.1"
    address = str(ray.util.get_node_ip_address())
    return f"[{address}]" if ":" in address else address


def _store(path: Path, text: str) -> None:
    # With its mode from the beginning: nobody else can open it in between.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
