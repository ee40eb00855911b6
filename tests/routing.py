"""Routers for tests: the real one in a thread, before servers in threads or processes of their own."""

from contextlib import ExitStack, contextmanager

from intarsia_zmq.options import RouteOptions, ZmqOptions
from intarsia_zmq.routing.server import open_router
from serving import FakeEngine, Running, eventually, serving

#: Short times, for tests that wait for them.
QUICK = {"lost_after_s": 1.0, "wait_s": 5.0}


def listed(router):
    """Return the router's list of replicas: address -> line."""
    return {line["replica"]: line for line in router.control("replicas").body["replicas"]}


def states(router):
    return [line["state"] for line in listed(router).values()]


@contextmanager
def routing(tmp_path, replicas, *, route=None, keys=None, wait=True, **options):
    """Route to addresses, on ipc sockets in a folder unless options say otherwise; wait until all are ready."""
    places = {
        "bind": f"ipc://{tmp_path}/front",
        "control": f"ipc://{tmp_path}/front.control",
        "heartbeat_s": 2.0,
        "grace_s": 0.5,
    }
    made = ZmqOptions(**(places | options))
    running = Running(open_router(made, list(replicas), RouteOptions(**(QUICK | (route or {}))), keys))
    running.thread.start()
    try:
        if wait:
            eventually(lambda: set(states(running)) == {"ready"} and usable(running))
        yield running
    finally:
        if running.thread.is_alive():
            running.control("shutdown", now=True)
        running.join()


def usable(router):
    return router.control("ping").body["state"] == "ready"


@contextmanager
def fleet(tmp_path, *engines, route=None, **options):
    """A router before so many servers in threads; yield (router, the servers)."""
    with ExitStack() as stack:
        servers = []
        for number, engine in enumerate(engines):
            (tmp_path / str(number)).mkdir()
            servers.append(stack.enter_context(serving(tmp_path / str(number), engine or FakeEngine())))
        router = stack.enter_context(routing(tmp_path, [each.address for each in servers], route=route, **options))
        yield router, servers


def held(router):
    """Return what a router holds that it should not while nobody asks for anything, by name."""
    status = router.control("status").body
    found = {name: status[name] for name in ("in_flight", "waiting", "waiting_bytes", "kept_bytes")}
    for line in listed(router).values():
        found |= {f"{name} of {line['replica']}": line[name] for name in ("in_flight", "choices", "queued_tokens")}
    return {name: count for name, count in found.items() if count}


def is_idle(router, *servers):
    """Whether neither a router nor the servers behind it are at anything."""
    return not held(router) and not any(each.engine.has_work for each in servers)
