"""The sockets of a server: where they listen, with which keys, and what watches them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import zmq
from attrs import define, frozen

from intarsia_zmq.keys import KeyPair
from intarsia_zmq.limits import WireLimits
from intarsia_zmq.monitor import Monitor
from intarsia_zmq.options import ZmqOptions
from intarsia_zmq.router import Router
from intarsia_zmq.security import Address, ClientKeys, Gate, bind

#: How long the last messages may take to leave when the sockets close.
_LINGER_MS = 1000
#: Subscriptions are short.
_SUBSCRIPTION_BYTES = 1024
CONTROL_LIMITS = WireLimits(message_bytes=64 << 10)


@frozen(kw_only=True)
class Places:
    """Where to listen, and with which keys.

    Attributes:
        control, events: None is off.
        secret: the server's keys; None encrypts nothing.
        client_keys: folder of those who may connect, where there is a secret.
    """

    data: Address
    control: Address | None = None
    events: Address | None = None
    secret: KeyPair | None = None
    client_keys: Path | None = None


@define(eq=False, kw_only=True)
class Sockets:
    """All sockets of a server, bound, in a context of their own. One thread calls it.

    Attributes:
        gate: judges clients' keys; None lets everybody in.
        monitor: tells of the data socket's connections.
        publisher: None publishes no events.
        addresses: name of a socket -> where it listens, with the port that it took.
    """

    context: zmq.Context[zmq.Socket[bytes]]
    data: Router
    control: Router | None
    gate: Gate | None
    monitor: Monitor
    publisher: zmq.Socket[bytes] | None
    addresses: dict[str, str]

    @classmethod
    def open(
        cls, options: ZmqOptions, places: Places, lost: Callable[[bytes], None], clock: Callable[[], float]
    ) -> Sockets:
        """Bind them all.

        Args:
            options: bounds and times.
            places: where to.
            lost: told of a data connection that is closed.
            clock: seconds.

        Raises:
            ConfigError: an address cannot be listened to; names the option.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            return cls._bound(context, options, places, lost, clock)
        except BaseException:
            context.destroy(linger=0)
            raise

    @classmethod
    def _bound(
        cls,
        context: zmq.Context[zmq.Socket[bytes]],
        options: ZmqOptions,
        places: Places,
        lost: Callable[[bytes], None],
        clock: Callable[[], float],
    ) -> Sockets:
        # Before any socket that it judges for.
        gate = None if places.client_keys is None else Gate.open(context, ClientKeys(places.client_keys, clock))
        data = Router.open(
            context,
            lost,
            message_bytes=options.limits.message_bytes,
            heartbeat_s=options.heartbeat_s,
            max_bytes=options.client_bytes,
            named=gate is not None,
        )
        _encrypt(data.socket, places.secret)
        monitor = Monitor.of(data.socket)
        addresses = {"data": bind(data.socket, places.data, "frontend.bind")}
        control, publisher = None, None
        if places.control is not None:
            limit = CONTROL_LIMITS.message_bytes
            control = Router.open(context, _ignore, message_bytes=limit, heartbeat_s=options.heartbeat_s)
            addresses["control"] = bind(control.socket, places.control, "frontend.control")
        if places.events is not None:
            publisher = context.socket(zmq.PUB)
            publisher.maxmsgsize = _SUBSCRIPTION_BYTES
            _encrypt(publisher, places.secret)
            addresses["events"] = bind(publisher, places.events, "frontend.events")
        return cls(
            context=context,
            data=data,
            control=control,
            gate=gate,
            monitor=monitor,
            publisher=publisher,
            addresses=addresses,
        )

    def close(self) -> None:
        """Close them, and remove their files. What was sent last has a moment to leave."""
        self.data.socket.disable_monitor()
        self.monitor.socket.close(0)
        if self.gate is not None:
            self.gate.socket.close(0)
        self.context.destroy(linger=_LINGER_MS)
        for address in self.addresses.values():
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def _encrypt(socket: zmq.Socket[bytes], secret: KeyPair | None) -> None:
    if secret is not None:
        socket.curve_server = 1
        socket.curve_secretkey = secret.secret
        socket.curve_publickey = secret.public
        socket.zap_domain = b"intarsia"


def _ignore(connection: bytes) -> None:
    """Whoever controls the server and is gone is no loss."""
    del connection
