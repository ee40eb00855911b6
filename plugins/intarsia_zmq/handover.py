"""What the server's two threads hand each other: commands to the engine's, and its reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from attrs import frozen

from intarsia.errors import IntarsiaError
from intarsia.protocols import EngineHandle
from intarsia.types import Output, Request
from intarsia_zmq.admission import AdmissionLimits

# --- commands ---------------------------------------------------------------------------------------------------------


@frozen(eq=False)
class Add:
    """Run a request, when its client's turn comes.

    Attributes:
        request: its id is the server's own.
        client: whose turn.
        cost: tokens that it may take.
        num_bytes: of the message that it came in.
    """

    request: Request
    client: Hashable
    cost: int
    num_bytes: int


@frozen(eq=False)
class Cancel:
    """End a request, wherever it is."""

    key: str


@frozen(eq=False)
class Ask:
    """A question to the engine, answered between steps with an `Answered` of the same `tag`."""

    tag: Any
    question: Callable[[EngineHandle], Any]
    num_bytes: int = 0


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
    """The engine is ready."""

    engine: EngineHandle
    explained: Mapping[str, Any]


@frozen(eq=False)
class Refused:
    """A request never began."""

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
Report: TypeAlias = list[Output] | Started | Refused | Answered | Figures | Failed | Stopped
