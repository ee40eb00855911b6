"""Replicas on a Ray cluster, with a router before them: placement, life and death are Ray's."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_commands() -> list[Provider]:
    """Offer `intarsia ray`."""
    summary = "Serve replicas of an engine on a Ray cluster at one address."
    return [Provider(key="ray", summary=summary, build=lazy("intarsia_ray.command:build"))]
