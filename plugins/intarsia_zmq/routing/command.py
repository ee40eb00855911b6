"""`intarsia route`: serve in front of replicas, and look after these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
import click

from intarsia.errors import ConfigError, did_you_mean
from intarsia.protocols import Context
from intarsia_zmq.changes import read_changes
from intarsia_zmq.commands import ZmqCommand
from intarsia_zmq.control_client import ask_control, default_control
from intarsia_zmq.options import Limits, RouteOptions, ZmqOptions
from intarsia_zmq.routing.server import ReplicaKeys, open_router

T = TypeVar("T")


@click.group(invoke_without_command=True)
@click.option("--endpoint", metavar="URL", help="Where clients connect. [default: tcp://127.0.0.1:5555]")
@click.option("--replica", "replicas", multiple=True, metavar="URL", help="A server behind it. Repeatable.")
@click.option("--policy", metavar="POLICY", help="prefix, least_loaded or round_robin. [default: prefix]")
@click.option("--replica-server-key", metavar="KEY", help="The replicas' public CURVE key, or the file of it.")
@click.option("--replica-key", metavar="FILE", help="The file of this router's secret CURVE key.")
@click.option(
    "-o",
    "changes",
    multiple=True,
    metavar="OPTION=VALUE",
    help="An option of the frontend `zmq`, such as server_key=FILE, or of the router, as route.wait_s=5. Repeatable.",
)
@click.pass_context
def route(
    context: click.Context,
    *,
    endpoint: str | None,
    replicas: tuple[str, ...],
    policy: str | None,
    replica_server_key: str | None,
    replica_key: str | None,
    changes: tuple[str, ...],
) -> None:
    """Serve at one address what several servers do.

    A request goes to the replica where its prefix is cached and load allows. Where a replica is lost, its requests go
    on at another. Replicas are added and removed while it runs: `intarsia route add URL`, `drain`, `remove`, `list`.
    """
    if context.invoked_subcommand is not None:
        return
    said = read_changes(changes)
    routed = said.pop("route", {})
    if not isinstance(routed, dict):
        raise ConfigError("route: give its options one by one, such as route.wait_s=5", field="route")
    if endpoint is not None:
        said["bind"] = endpoint
    if policy is not None:
        routed["policy"] = policy
    options = read_options(said)
    keys = ReplicaKeys(server_key=replica_server_key, key=replica_key)
    open_router(options, replicas, _made(RouteOptions, routed, "route."), keys).serve()


def read_options(said: Mapping[str, Any]) -> ZmqOptions:
    """Return the frontend's options from a map of them.

    Raises:
        ConfigError: one is unknown, or its value is wrong; names it.
    """
    limits = said.get("limits", {})
    if not isinstance(limits, dict):
        raise ConfigError("limits: give them one by one, such as limits.requests=100", field="limits")
    return _made(ZmqOptions, {**said, "limits": _made(Limits, limits, "limits.")}, "")


#: How options are written -> what their values are.
_KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}


def _made(kind: type[T], said: Mapping[str, Any], path: str) -> T:
    """Make options of a map, with the checks that a config's loader makes."""
    known = {each.name: each for each in attrs.fields(kind)}  # type: ignore[arg-type]
    for name, value in said.items():
        if name not in known:
            raise ConfigError(f"{path}{name}: unknown.{did_you_mean(name, known)}", field=f"{path}{name}")
        written = str(known[name].type)
        types = _KINDS.get(written, ())
        if (types and type(value) not in types) or not _listed(written, value):
            raise ConfigError(f"{path}{name}: {value!r:.64} is not {written}", field=f"{path}{name}")
    try:
        return kind(**said)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}{error}", field=path.rstrip(".") or None) from error


def _listed(written: str, value: Any) -> bool:
    """Whether a value is among those of a `Literal`, where the option is one."""
    if not written.startswith("Literal["):
        return True
    return isinstance(value, str) and f'"{value}"' in written


# --- verbs ------------------------------------------------------------------------------------------------------------

_CONTROL = click.option("--control", metavar="URL", help="The router's control socket. [default: the one of port 5555]")
_TIMEOUT = click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the router's answer.",
)


def _verb(name: str, kind: str, text: str) -> None:
    @route.command(name, help=text)
    @click.argument("replica", metavar="URL")
    @_CONTROL
    @_TIMEOUT
    def call(*, replica: str, control: str | None, timeout_s: float) -> None:
        _tell(control, kind, {"replica": replica}, timeout_s)


_verb("add", "add_replica", "Add a replica, or use again one that was drained.")
_verb("drain", "drain_replica", "Give a replica nothing more; it finishes what it has.")
_verb("remove", "remove_replica", "Forget a replica at once; what it is at goes on elsewhere.")


@route.command("list")
@_CONTROL
@_TIMEOUT
def list_replicas(*, control: str | None, timeout_s: float) -> None:
    """List the replicas, how they are and what they are at."""
    _tell(control, "replicas", {}, timeout_s)


def _tell(control: str | None, kind: str, body: dict[str, Any], timeout_s: float) -> None:
    answer = ask_control(control or default_control(), kind, body, timeout_s=timeout_s)
    click.echo(json.dumps(answer, indent=2))


def build(context: Context) -> ZmqCommand:
    """Make the command."""
    del context
    return ZmqCommand(route)
