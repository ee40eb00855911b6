"""A router's control socket: all that a server's knows, and its replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from attrs import define

from intarsia.errors import ConfigError, InvalidRequestError
from intarsia_zmq.control import Control
from intarsia_zmq.errors import UnsupportedError
from intarsia_zmq.routing.loop import RoutingLoop
from intarsia_zmq.security import read_address
from intarsia_zmq.verbs import wrong
from intarsia_zmq.wire import Message

log = logging.getLogger("intarsia.zmq")

#: What is understood here besides what a server's control socket does. Each is answered with `replicas`, the list of
#: them; each but the first names one by `replica`, its address.
REPLICA_KINDS = ("replicas", "add_replica", "drain_replica", "remove_replica")


@define(eq=False, kw_only=True)
class RoutingControl(Control):
    """Answers whoever may open the control socket.

    Attributes:
        loop: the router's.
    """

    loop: RoutingLoop

    def _answer(self, message: Message) -> Message:
        kind = message.kind
        if kind not in REPLICA_KINDS:
            return super()._answer(message)
        if kind != "replicas":
            name = message.body.get("replica")
            if not isinstance(name, str):
                raise wrong("replica", name, "the address of a replica, such as tcp://127.0.0.1:5556")
            change: dict[str, Callable[[str], Any]] = {
                "add_replica": self._add,
                "drain_replica": self.loop.fleet.drain,
                "remove_replica": self.loop.remove,
            }
            change[kind](name)
            log.info("control: %s %s", kind, name)
        return Message("replicas", message.id, 0, {"replicas": self.loop.fleet.listed()})

    def _swap(self, message: Message, connection: bytes) -> None:
        del message, connection
        raise UnsupportedError("swap: a router has no engine; swap at the control socket of each replica", field="kind")

    def _add(self, name: str) -> None:
        try:
            self.loop.fleet.add(check_replica(name))
        except ConfigError as error:
            raise InvalidRequestError(f"{error}", field="replica") from error


def check_replica(name: str) -> str:
    """Return the address of a replica.

    Raises:
        ConfigError: it is none that can be connected to.
    """
    read_address(name, "replica")
    if name.endswith(":*"):
        raise ConfigError(f"replica: {name!r} has no port", field="replica")
    return name
