"""The commands around a server: `intarsia client`, `health`, `control`, `swap`, `live` and `keygen`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from intarsia.errors import ConfigError, IntarsiaError
from intarsia.protocols import Context
from intarsia_zmq.changes import read_changes
from intarsia_zmq.client import Client
from intarsia_zmq.client_command import client, connection_options
from intarsia_zmq.control_client import ask_control, default_control
from intarsia_zmq.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, write_keys
from intarsia_zmq.live_command import live
from intarsia_zmq.swap_command import swap


@frozen
class ZmqCommand:
    """A click command, as a part."""

    _command: click.Command

    def command(self) -> click.Command:
        """Return the click command."""
        return self._command


def _builder(command: click.Command) -> Callable[[Context], ZmqCommand]:
    return lambda _: ZmqCommand(command)


# --- health -----------------------------------------------------------------------------------------------------------


@click.command()
@connection_options
@click.option("--control", metavar="URL", help="Ask the control socket here instead.")
@click.option(
    "--max-step-age",
    "max_age_s",
    type=float,
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="With work to do, how long ago the last step may have ended.",
)
def health(*, connection: dict[str, Any], control: str | None, max_age_s: float) -> None:
    """Tell whether a server is alive and ready.

    Exits with 0 where it is, and with 1 where it is not: it does not answer in time, it starts, drains, pauses or has
    failed, or it has work and its last step is too old.
    """
    try:
        if control is None:
            with Client(**connection) as server:
                pong = server.ping()
            state, age_s = pong.state, pong.step_age_s
        else:
            told = ask_control(control, "ping", timeout_s=connection["timeout_s"])
            state, age_s = told["state"], told.get("step_age_s")
    except ConfigError:
        raise
    except IntarsiaError as error:
        state, age_s = f"{error}", None
    trouble = _trouble(state, age_s, max_age_s)
    click.echo(state if trouble is None else f"not healthy: {trouble}")
    if trouble is not None:
        sys.exit(1)


def _trouble(state: str, age_s: float | None, max_age_s: float) -> str | None:
    if state != "ready":
        return state
    if age_s is not None and age_s > max_age_s:
        return f"there is work, and the last step ended {age_s:.1f} s ago; --max-step-age is {max_age_s:g} s"
    return None


# --- control ----------------------------------------------------------------------------------------------------------


@click.group()
@click.option("--control", metavar="URL", help="The control socket. [default: the one of port 5555]")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the server's answer.",
)
@click.pass_context
def control(context: click.Context, *, control: str | None, timeout_s: float) -> None:
    """Look after a server on this machine.

    Each prints the server's answer as JSON.
    """
    context.obj = {"address": control, "timeout_s": timeout_s}


def _verb(kind: str, text: str) -> None:
    @control.command(kind, help=text)
    @click.pass_obj
    def call(place: dict[str, Any]) -> None:
        _tell(place, kind, {})


_verb("status", "Show the server's state and figures.")
_verb("drain", "Take no new requests; finish those that run.")
_verb("pause", "Stop stepping; requests wait.")
_verb("resume", "End a pause or a drain.")


@control.command()
@click.option("--now", is_flag=True, help="Finish nothing: requests end at once.")
@click.pass_obj
def shutdown(place: dict[str, Any], *, now: bool) -> None:
    """Drain, then end the server."""
    _tell(place, "shutdown", {"now": True} if now else {})


@control.command()
@click.argument("options", nargs=-1, metavar="[OPTION=VALUE]...")
@click.pass_obj
def reload(place: dict[str, Any], *, options: tuple[str, ...]) -> None:
    """Read the clients' keys anew, and change options of the frontend, such as limits.requests=100.

    The answer says which were applied, and which need a restart.
    """
    _tell(place, "reload", {"options": read_changes(options)} if options else {})


def _tell(place: dict[str, Any], kind: str, body: dict[str, Any]) -> None:
    address = place["address"] or default_control()
    answer = ask_control(address, kind, body, timeout_s=place["timeout_s"])
    click.echo(json.dumps(answer, indent=2))


# --- keys -------------------------------------------------------------------------------------------------------------

_NEXT = """\
Secret keys ({secret}) stay where they are used; public keys ({public}) may be known.
A server's config has, with a folder of the public keys of those who may connect, reread as it changes:
  [frontend]
  use = "zmq"
  server_key = "{server}{secret}"
  client_keys = "FOLDER"
A client gives the server's public key and its own secret one:
  intarsia client --server-key {server}{public} --key {client}{secret} "Hello\""""


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--name",
    "names",
    multiple=True,
    default=("server", "client"),
    metavar="NAME",
    help="Of a pair. Repeatable. [default: server and client]",
)
def keygen(*, folder: Path, names: tuple[str, ...]) -> None:
    """Make CURVE key pairs in DIR: NAME.key is public, NAME.key_secret is for its owner alone.

    Files that are there are never overwritten.
    """
    for name in names:
        for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX):
            if os.path.lexists(folder / f"{name}{suffix}"):
                raise ConfigError(
                    f"{folder / f'{name}{suffix}'} is there already; move it away first, or give another --name",
                    field="name",
                )
    for name in dict.fromkeys(names):
        for path in write_keys(folder, name):
            click.echo(path)
    server, client = str(folder / names[0]), str(folder / names[-1])
    if server == client:  # one pair is a server's or a client's, never both
        server, client = (server, "CLIENT") if names[0] == "server" else ("SERVER", client)
    click.echo(_NEXT.format(secret=SECRET_SUFFIX, public=PUBLIC_SUFFIX, server=server, client=client), err=True)


build_client = _builder(client)
build_health = _builder(health)
build_control = _builder(control)
build_keygen = _builder(keygen)
build_swap = _builder(swap)
build_live = _builder(live)
