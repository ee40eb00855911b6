"""What the server's two threads hand each other: commands to the engine's, and its reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol, TypeAlias

from attrs import field, frozen

from intarsia.errors import IntarsiaError
from intarsia.protocols import EngineHandle
from intarsia.types import Output, Request
from intarsia_zmq.admission import AdmissionLimits
from intarsia_zmq.wire import Message

# --- commands ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Add:
    """Run a request, when its client's turn comes.

    Attributes:
        request: its id is the server's own.
        client: whose turn.
        cost: tokens that it may take.
        num_bytes: of the message that it came in.
        stream: whether its client takes deltas.
    """

    request: Request
    client: Hashable
    cost: int
    num_bytes: int
    stream: bool = True


@frozen(eq=False)
class Cancel:
    """End a request, wherever it is."""

    key: str


@frozen(eq=False)
class Ask:
    """A question to the engine, answered between steps with an `Answered` of the same `tag`.

    Attributes:
        message: as the client put it, for a loop that has another server answer.
    """

    tag: Any
    question: Callable[[EngineHandle], Any]
    num_bytes: int = 0
    message: Message = field(factory=lambda: Message(""))


@frozen(eq=False)
class Pause:
    """Stop stepping, or go on."""

    paused: bool


@frozen(eq=False)
class Admit:
    """Hold admission to these limits from now on."""

    limits: AdmissionLimits


@frozen(eq=False)
class Stop:
    """Close the engine and end the thread."""


Command: TypeAlias = Add | Cancel | Ask | Pause | Admit | Stop

# --- reports ----------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Started:
    """What answers requests is ready.

    Attributes:
        model: family, vocab_size, max_model_len, chat, and where the config does not say it the name.
        explained: what it is made of.
    """

    model: Mapping[str, Any]
    explained: Mapping[str, Any]


@frozen(eq=False)
class Halted:
    """Nothing can run for now; another `Started` says when it can."""


@frozen(eq=False)
class Refused:
    """A request never began, or cannot go on."""

    key: str
    error: IntarsiaError


@frozen(eq=False)
class Answered:
    """What a question led to."""

    tag: Any
    answer: Any = None
    error: IntarsiaError | None = None


@frozen(eq=False)
class Figures:
    """What a step came to, where figures are wanted."""

    seconds: float
    num_outputs: int
    stats: Mapping[str, Any]


@frozen(eq=False)
class Failed:
    """The engine could not start, or runs nothing more."""

    error: BaseException


@frozen(eq=False)
class Stopped:
    """The engine is closed; nothing follows."""


#: The outputs of a step come as a plain list.
Report: TypeAlias = list[Output] | Started | Halted | Refused | Answered | Figures | Failed | Stopped


class Loop(Protocol):
    """What answers a server's requests: an engine on a thread of its own, or a router's replicas.

    The server's thread calls it, and is woken where there are reports.

    Attributes:
        reports: to be taken from the left.
        waiting: requests that wait for their turn.
        waiting_bytes: of what is held until it is answered, or has entered the engine.
    """

    @property
    def reports(self) -> deque[Report]: ...

    @property
    def waiting(self) -> int: ...

    @property
    def waiting_bytes(self) -> int: ...

    def start(self) -> None:
        """Begin."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait for the end after a `Stop`; return whether it came in time."""
        ...

    def post(self, command: Command) -> None:
        """Give a command; it never waits."""
        ...

    def turn(self) -> None:
        """Do what is left to the server's thread: called when that is woken, and some times a second."""
        ...

    def step_age_s(self, now: float) -> float | None:
        """Return seconds since work was last seen to go on; None where there is none."""
        ...
