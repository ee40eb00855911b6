"""`intarsia ray`."""

from __future__ import annotations

from pathlib import Path

import click
from attrs import evolve

from intarsia.cli.loading import check_model
from intarsia.cli.options import config_options
from intarsia.config import as_dict
from intarsia.protocols import Context
from intarsia.types import EngineConfig
from intarsia_ray.cluster import Cluster, check_ray, connect
from intarsia_ray.plan import Plan
from intarsia_zmq.options import RouteOptions, ZmqOptions


class RayCommand:
    """The command, as a part."""

    def command(self) -> click.Command:
        """Return the click command."""
        return ray


@click.command()
@config_options
@click.option("--replicas", type=int, default=1, show_default=True, metavar="N", help="Engines, each in a process.")
@click.option(
    "--tp", type=int, default=1, show_default=True, metavar="N", help="Ranks that split each engine's layers."
)
@click.option("--endpoint", metavar="URL", help="Where clients connect. [default: tcp://127.0.0.1:5555]")
@click.option("--address", metavar="HOST:PORT", help="A Ray cluster, or auto. [default: begin one on this machine]")
@click.option("--cpus", type=float, default=1.0, show_default=True, metavar="N", help="Cores of one rank.")
@click.option("--gpus", type=float, metavar="N", help="GPUs of one rank. [default: 1 where engine.device is one]")
@click.option(
    "--policy",
    type=click.Choice(["prefix", "least_loaded", "round_robin"]),
    default="prefix",
    show_default=True,
    help="Which replica takes a request: one that has its prefix, the least busy, or the next in turn.",
)
@click.option("--server-key", metavar="FILE", help="The secret key that clients see; see `intarsia keygen`.")
@click.option("--client-keys", metavar="DIR", help="The public keys of those who may connect.")
def ray(
    *,
    config: EngineConfig,
    replicas: int,
    tp: int,
    endpoint: str | None,
    address: str | None,
    cpus: float,
    gpus: float | None,
    policy: str,
    server_key: str | None,
    client_keys: str | None,
) -> None:
    """Serve replicas of an engine on a Ray cluster, at one address.

    Ray places them, and begins those anew that die; a router before them moves their requests. Every machine of the
    cluster needs Intarsia and the model at the same path, or a name of the hub.
    """
    check_model(config)
    check_ray()
    device = str(config.engine.device)
    on_gpus = device.startswith("cuda")
    plan = Plan(
        config=as_dict(config),
        replicas=replicas,
        tp=tp,
        cpus=cpus,
        gpus=(1 if on_gpus else 0) if gpus is None else gpus,
    )
    options = ZmqOptions(server_key=server_key or "", client_keys=client_keys or "")
    if endpoint is not None:
        options = evolve(options, bind=endpoint)
    route = RouteOptions(policy=policy)  # type: ignore[arg-type]  # click has checked it
    connect(address)
    import ray as cluster

    try:
        Cluster.open(plan, options, route, name=Path(str(config.model.use)).name).serve()
    finally:
        cluster.shutdown()


def build(context: Context) -> RayCommand:
    """Make the command."""
    del context
    return RayCommand()
