"""A cluster that serves: actors on Ray, a router in this process, and a watch between them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from intarsia.errors import ConfigError
from intarsia_ray.plan import Plan
from intarsia_ray.replica import ServingReplica
from intarsia_ray.watch import Watch
from intarsia_zmq.control_client import ask_control
from intarsia_zmq.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, write_keys
from intarsia_zmq.options import RouteOptions, ZmqOptions
from intarsia_zmq.routing.server import ReplicaKeys, open_router
from intarsia_zmq.server import Server

#: How long an actor may take to say how it is before it is asked anew.
_PATIENCE_S = 10.0
_CONTROL_S = 5.0


def check_ray() -> None:
    """Raise ConfigError where Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError('ray is not installed: pip install "intarsia[ray]"')


@define(eq=False)
class RayActor:
    """An actor's handle, asked without waiting.

    Attributes:
        handle: Ray's.
        group: what Ray has set aside for it, or None.
    """

    handle: Any
    group: Any = None
    _asked: Any = field(default=None, init=False)
    _asked_at: float = field(default=0.0, init=False)

    def poll(self) -> Mapping[str, Any] | None:
        """Return its newest state; None while it begins, or is out of reach."""
        import ray

        now = time.monotonic()
        if self._asked is None or now - self._asked_at > _PATIENCE_S:
            self._asked, self._asked_at = self.handle.state.remote(), now
        ready, _ = ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        asked, self._asked = self._asked, None
        try:
            state: dict[str, Any] = ray.get(asked)
        except ray.exceptions.RayError:
            return None  # it is being restarted
        return state

    def restart(self) -> None:
        """End its process; Ray begins another."""
        import ray

        ray.kill(self.handle, no_restart=False)

    def close(self) -> None:
        """End it for good, and give back what it had."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.handle)
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


@define(eq=False, kw_only=True)
class Cluster:
    """Replicas and the router before them.

    Attributes:
        server: the router; it listens already.
        actors: the replicas'.
        watch: between the two.
    """

    server: Server
    actors: Sequence[RayActor]
    watch: Watch
    _folder: Any

    @classmethod
    def open(cls, plan: Plan, options: ZmqOptions, route: RouteOptions | None = None, *, name: str) -> Cluster:
        """Begin the replicas; nothing is waited for. Ray has to be connected to.

        The replicas have keys of their own, made here, and let nobody in but the router.

        Args:
            plan: what to run.
            options: of the router's sockets; without a control socket it gets one for this process's own use.
            route: where requests go.
            name: of the model, as clients see it.

        Raises:
            ConfigError: an address or a key is wrong.
        """
        folder = tempfile.TemporaryDirectory(prefix="intarsia-ray-")
        keys = Path(folder.name)
        for each in ("replicas", "router"):
            write_keys(keys, each)
        if options.control in ("", "auto"):
            options = evolve(options, control=f"ipc://{folder.name}/control")
        shown = ReplicaKeys(
            server_key=keys / f"replicas{PUBLIC_SUFFIX}",
            key=keys / f"router{SECRET_SUFFIX}",
        )
        server = open_router(options, (), route, shown)
        texts = {
            "server": (keys / f"replicas{SECRET_SUFFIX}").read_text(),
            "client": (keys / f"router{PUBLIC_SUFFIX}").read_text(),
        }
        actors = [_actor(plan, name, texts) for _ in range(plan.replicas)]
        control = server.addresses["control"]

        def tell(kind: str, address: str) -> None:
            ask_control(control, kind, {"replica": address}, timeout_s=_CONTROL_S)

        def stop() -> None:
            ask_control(control, "shutdown", {"now": True}, timeout_s=_CONTROL_S)

        watch = Watch(actors=actors, tell=tell, stop=stop)
        return cls(server=server, actors=actors, watch=watch, folder=folder)

    def serve(self) -> None:
        """Serve until a signal or the control socket ends it; then end the replicas.

        Raises:
            ExecutionError: no replica can serve; says why.
        """
        self.watch.start()
        try:
            self.server.serve()
        finally:
            self.close()
        if self.watch.failure is not None:
            raise self.watch.failure

    def close(self) -> None:
        """End the watch and the replicas."""
        self.watch.close()
        for actor in self.actors:
            actor.close()
        self._folder.cleanup()


def connect(address: str | None) -> None:
    """Connect to a Ray cluster, or begin one on this machine.

    Args:
        address: of Ray's head, such as ray-head:6379, or "auto"; None begins one.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
    """
    check_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    try:
        ray.init(address=address, include_dashboard=False if address is None else None, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(f"address: {address!r} leads to no Ray cluster: {error}", field="address") from error


def _actor(plan: Plan, name: str, keys: Mapping[str, str]) -> RayActor:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    resources = plan.resources
    options: dict[str, Any] = {"num_cpus": resources["CPU"], "max_restarts": -1, "max_concurrency": 2}
    if "GPU" in resources:
        options["num_gpus"] = resources["GPU"]
    group = None
    if plan.ranks > 1:
        # One bundle is on one machine, and stays this replica's while Ray restarts it.
        group = ray.util.placement_group([resources], strategy="STRICT_PACK")
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(placement_group=group)
    remote = ray.remote(ServingReplica).options(**options)
    near = ray.get_runtime_context().get_node_id()
    return RayActor(remote.remote(plan.engine_config, name, dict(keys), near), group)
