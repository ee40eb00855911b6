"""The frontend `zmq`: options and config to a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from attrs import define

from intarsia.errors import ConfigError
from intarsia.protocols import EngineHandle, FrontendContext
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.security import Address, check_control, check_exposure, read_address, read_secret
from intarsia_zmq.server import Server
from intarsia_zmq.sockets import Places


@define(eq=False)
class ZmqFrontend:
    """Serves an engine over ZeroMQ.

    Attributes:
        options: checked.
        model: how the config names the model.
        start_engine: makes the engine.
    """

    options: ZmqOptions
    model: str
    places: Places
    start_engine: Callable[[], EngineHandle]

    def serve(self) -> None:
        """Serve until a signal or the control socket ends it.

        Raises:
            ConfigError: an address or a key is wrong; the engine has not been started.
            ExecutionError: the engine failed; its clients have been told.
        """
        self.server().serve()

    def server(self) -> Server:
        """Return the server, which listens already: the engine starts when it serves."""
        return Server.open(self.options, self.places, self.model, self.start_engine)


def build(context: FrontendContext) -> ZmqFrontend:
    """Make the frontend; check what can be checked before anything slow begins.

    Raises:
        ConfigError: an address is wrong, or needs keys; names the option.
    """
    options: ZmqOptions = context.options
    return ZmqFrontend(options, _name(context.config.model.use), places_of(options), context.start_engine)


def places_of(options: ZmqOptions) -> Places:
    """Return where to listen and with which keys.

    Raises:
        ConfigError: an address is wrong, or needs keys; names the option.
    """
    if bool(options.server_key) != bool(options.client_keys):
        missing = f"frontend.{'client_keys' if options.server_key else 'server_key'}"
        raise ConfigError(f"{missing}: missing; server_key and client_keys go together", field=missing)
    secret = read_secret(Path(options.server_key), "frontend.server_key") if options.server_key else None
    folder = Path(options.client_keys) if options.client_keys else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"frontend.client_keys: {folder} is not a folder", field="frontend.client_keys")
    data = read_address(options.bind, "frontend.bind")
    events = read_address(options.events, "frontend.events") if options.events else None
    for address, name in ((data, "frontend.bind"), (events, "frontend.events")):
        if address is not None:
            check_exposure(address, name, secured=secret is not None, insecure=options.insecure)
    return Places(data=data, control=_control(options, data), events=events, secret=secret, client_keys=folder)


def _control(options: ZmqOptions, data: Address) -> Address | None:
    if options.control == "auto":
        folder = os.environ.get("XDG_RUNTIME_DIR", "")
        if not folder or not Path(folder).is_dir():
            return None
        # Named after the port, so that whoever knows one address knows both.
        name = data.path.name if data.path is not None else data.text.rpartition(":")[2].replace("*", str(os.getpid()))
        return read_address(f"ipc://{folder}/intarsia-{name}.control", "frontend.control")
    if not options.control:
        return None
    address = read_address(options.control, "frontend.control")
    check_control(address, "frontend.control")
    return address


def _name(reference: str) -> str:
    """Return the model's name without the path of this machine that it may stand in."""
    return Path(reference).name if Path(reference).is_absolute() or Path(reference).exists() else reference
