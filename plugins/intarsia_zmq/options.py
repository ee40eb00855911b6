"""Options of the ZeroMQ frontend."""

from __future__ import annotations

from typing import Literal

from attrs import Factory, field, frozen
from attrs.validators import ge, gt


def _limit(default: int) -> int:
    limit: int = field(default=default, validator=ge(1))
    return limit


def _seconds(default: float) -> float:
    seconds: float = field(default=default, validator=gt(0))
    return seconds


@frozen(kw_only=True)
class Limits:
    """How much clients may ask for."""

    #: clients with sessions
    sessions: int = _limit(4096)
    #: requests in flight, of all clients
    requests: int = _limit(4096)
    #: requests in flight, of one client
    requests_of_client: int = _limit(1024)
    #: questions of one client, such as `tokenize`, that wait for their answers
    questions_of_client: int = _limit(16)
    #: bytes of all requests and questions that wait for the engine
    waiting_bytes: int = _limit(256 << 20)
    #: bytes of one message from a client
    message_bytes: int = _limit(4 << 20)
    #: tokens of one prompt; the model's own limit holds as well
    prompt_tokens: int = _limit(1 << 20)
    #: tokens of one answer; the model's own limit holds as well
    output_tokens: int = _limit(1 << 20)
    #: deltas of one request that may be on the way: the largest window
    credit: int = _limit(1024)


@frozen(kw_only=True)
class ZmqOptions:
    """Options of the ZeroMQ frontend."""

    #: where clients connect: tcp://host:port or ipc://path; port * takes a free one
    bind: str = "tcp://127.0.0.1:5555"
    #: where the server is controlled: ipc or loopback; auto is a socket in XDG_RUNTIME_DIR, if there is one; "" is off
    control: str = "auto"
    #: where events are published; "" is off
    events: str = ""
    #: listen beyond this machine without encryption and to anybody
    insecure: bool = False
    #: file with the server's secret key, as `intarsia keygen` makes it; given, clients have to have keys
    server_key: str = ""
    #: folder of the clients' public keys, reread as it changes
    client_keys: str = ""
    #: what clients may ask for
    limits: Limits = Factory(Limits)
    #: how often a client says something; silent for three of them, it is gone
    heartbeat_s: float = _seconds(5.0)
    #: how long a client that is gone may take to return to its requests
    grace_s: float = _seconds(30.0)
    #: how long a request with something to say may be without credit
    stall_timeout_s: float = _seconds(60.0)
    #: with work to do and no step ended for so long, the server is not alive
    alive_timeout_s: float = _seconds(60.0)
    #: when all requests have ended before a stop: how long clients may take to read the last
    drain_timeout_s: float = _seconds(10.0)
    #: deltas that may come before more is granted, where a request does not say
    credit: int = _limit(256)
    #: bytes that one request may keep for its client
    buffer_bytes: int = _limit(8 << 20)
    #: bytes that all requests of one client may keep
    client_bytes: int = _limit(64 << 20)
    #: sequences that wait in the engine's own queue; the others wait here, where clients take turns
    engine_queue: int = _limit(16)
    #: events that are kept for `replay`
    kept_events: int = _limit(4096)
    #: the least severe of the server's messages that are logged
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@frozen(kw_only=True)
class RouteOptions:
    """Options of a router, besides those of the sockets that its clients come to."""

    #: which replica a request goes to: where its prefix is cached and load allows, where load is least, or by turns
    policy: Literal["prefix", "least_loaded", "round_robin"] = "prefix"
    #: how many tokens of a prompt an answer that runs weighs as much as, where replicas are compared
    request_tokens: int = _limit(128)
    #: bytes of one block of a prompt, of which a replica has seen all or nothing
    block_bytes: int = field(default=128, validator=ge(16))
    #: blocks of one prompt that are looked at
    blocks_of_prompt: int = _limit(4096)
    #: blocks that are remembered of each replica
    blocks: int = _limit(65536)
    #: requests that one replica is given at a time; the others wait here, where clients take turns
    requests_of_replica: int = _limit(256)
    #: a replica that is out of reach, or answers no ping, for so long is lost
    lost_after_s: float = _seconds(5.0)
    #: a replica with work to do that ended no step for so long is lost
    stuck_after_s: float = _seconds(60.0)
    #: how long a request may wait while no replica can take it; 0 refuses it at once
    wait_s: float = field(default=30.0, validator=ge(0))
    #: how often a request may be sent again after it lost a replica: it may be what they die of
    replays: int = field(default=3, validator=ge(0))
    #: give a request without a seed one from here, so that it can be repeated elsewhere
    seeded: bool = True
