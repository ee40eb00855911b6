"""A router made of a server's parts: options to a server whose requests go to replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from attrs import frozen

from intarsia.errors import ConfigError
from intarsia_zmq.admission import Admission
from intarsia_zmq.calls import Events
from intarsia_zmq.connection import Connection
from intarsia_zmq.frontend import places_of
from intarsia_zmq.link import Address, Link
from intarsia_zmq.options import RouteOptions, ZmqOptions
from intarsia_zmq.routing.control import RoutingControl, check_replica
from intarsia_zmq.routing.fleet import Fleet
from intarsia_zmq.routing.loop import RoutingLoop
from intarsia_zmq.server import Server, admission_limits
from intarsia_zmq.waking import Waker


@frozen(kw_only=True)
class ReplicaKeys:
    """The keys to replicas that want some.

    Attributes:
        server_key: their public CURVE key, or the file of it; all have the same.
        key: the file of the router's own secret key.
    """

    server_key: str | Path | None = None
    key: str | Path | None = None


def open_router(
    options: ZmqOptions,
    replicas: Sequence[str],
    route: RouteOptions | None = None,
    keys: ReplicaKeys | None = None,
) -> Server:
    """Return a router, which listens already; `serve` connects to its replicas and serves until told to stop.

    Args:
        options: of the sockets that its clients come to; those of an engine's queue mean nothing here.
        replicas: addresses; more can be added by the control socket.
        route: where requests go.
        keys: to the replicas.

    Raises:
        ConfigError: an address or a key is wrong; names the field.
    """
    route = route or RouteOptions()
    names = [check_replica(name) for name in replicas]
    if len(set(names)) != len(names):
        raise ConfigError(f"replica: an address is given twice: {', '.join(names)}", field="replica")
    waker = Waker()
    fleet = Fleet(options=route, open_link=_opener(route, keys or ReplicaKeys()), wake=waker.wake)
    loop = RoutingLoop(
        options=route,
        fleet=fleet,
        names=names,
        wake=waker.wake,
        admission=Admission(admission_limits(options), time.monotonic),
        most_tokens=options.limits.output_tokens,
    )
    try:
        return Server.around(options, places_of(options), "", loop, waker, partial(RoutingControl, loop=loop))
    except BaseException:
        waker.close()
        raise


def _opener(route: RouteOptions, keys: ReplicaKeys) -> Callable[[str, Callable[[Events], None]], Link]:
    client = {"name": "intarsia-router", "version": version("intarsia")}
    # The keys are read once: files that change later are those of another router.
    pattern = Address.of("tcp://127.0.0.1:1", keys.server_key, keys.key)

    def open_link(name: str, deliver: Callable[[Events], None]) -> Link:
        address = Address(url=name, server_key=pattern.server_key, keys=pattern.keys)
        return Link(address, Connection(clock=time.monotonic, timeout_s=route.lost_after_s, client=client), deliver)

    return open_link
