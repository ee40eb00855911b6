"""`intarsia swap`: replace a part of a running server's engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from intarsia.errors import ConfigError
from intarsia_zmq.changes import read_changes
from intarsia_zmq.client import DEFAULT_ADDRESS
from intarsia_zmq.control_client import ControlClient, default_control
from intarsia_zmq.security import read_address


def control_of(address: str) -> str:
    """Return where the server of this data address is controlled, unless its config says otherwise.

    Raises:
        ConfigError: it is no address, or one of another machine.
    """
    found = read_address(address, "--address")
    if not found.local:
        raise ConfigError(
            f"--address: {address} is beyond this machine, and control never is; run this where the server is",
            field="address",
        )
    return default_control(found.path.name if found.path is not None else found.text.rpartition(":")[2])


@click.command()
@click.argument("change", metavar="SLOT=KEY")
@click.option(
    "-o",
    "--override",
    "overrides",
    metavar="SLOT.OPTION=VALUE",
    multiple=True,
    help="An option of the new part, as JSON or text. Repeatable.",
)
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, metavar="URL", help="The server's address.")
@click.option("--control", metavar="URL", help="Its control socket. [default: the one of the address's port]")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the server's answer.",
)
@click.option("--json", "wants_json", is_flag=True, help="Print a JSON object.")
def swap(
    *, change: str, overrides: tuple[str, ...], address: str, control: str | None, timeout_s: float, wants_json: bool
) -> None:
    """Replace a part of a running server's engine, such as scheduler=static; no request is lost.

    Where the new part fails, the one before goes on. The scheduler and the drafter can be replaced.
    """
    slot, use, options = read_swap(change, overrides)
    client = ControlClient(control or control_of(address), timeout_s)
    done = client.swap(slot, use, options)
    click.echo(json.dumps(done, indent=2) if wants_json else told(done))


def read_swap(change: str, overrides: tuple[str, ...]) -> tuple[str, str, dict[str, Any]]:
    """Return slot, key and options of `scheduler=static` and `scheduler.max_batch=4`.

    Raises:
        ConfigError: one has another form, or is about another slot.
    """
    slot, equals, use = change.partition("=")
    if not (equals and slot and use) or "." in slot:
        raise ConfigError(f"{change!r} is not SLOT=KEY, such as scheduler=static", field=slot)
    options = read_changes(overrides)
    others = [name for name in options if name != slot]
    if others:
        raise ConfigError(f"-o {others[0]}: no option of {slot}, which is swapped; such as {slot}.x=1", field=others[0])
    found = options.get(slot, {})
    if not isinstance(found, dict):
        raise ConfigError(f"-o {slot}={found}: the part is said before: {change}", field=slot)
    return slot, use, found


def told(done: Mapping[str, Any]) -> str:
    """Say what a swap did, in a line."""
    sequences, kept = done["sequences"], done["kept"]
    ran = "none was running" if not sequences else f"{sequences} sequences go on, {kept} with their pages"
    return f"{done['slot']}: {done['before']} -> {done['after']} in {1e3 * done['seconds']:.1f} ms; {ran}"
