"""The control socket: its messages have the form of all others and need no session."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from attrs import define, evolve, field, frozen

from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError
from intarsia.protocols import EngineHandle
from intarsia.types import Choice
from intarsia_zmq.dispatch import Dispatch
from intarsia_zmq.errors import UnsupportedError
from intarsia_zmq.handover import Admit, Answered, Ask
from intarsia_zmq.limits import WireLimits
from intarsia_zmq.messages import error_message
from intarsia_zmq.questions import RETRY_S
from intarsia_zmq.verbs import wrong
from intarsia_zmq.wire import Frames, Message, decode, encode

log = logging.getLogger("intarsia.zmq")

#: What is understood here; docs/wire-protocol.md says what each does.
KINDS = ("status", "drain", "pause", "resume", "reload", "swap", "shutdown", "ping")
_LEVELS = ("debug", "info", "warning", "error")
_SECONDS = ("grace_s", "stall_timeout_s")
_SESSION_COUNTS = ("buffer_bytes", "client_bytes")
_LIMITS = ("sessions", "requests", "requests_of_client", "questions_of_client", "waiting_bytes")


@frozen
class ControlAsked:
    """Whose question on the control socket the engine answers."""

    connection: bytes
    request_id: str


def _swap_part(slot: str, choice: Choice, engine: EngineHandle) -> Mapping[str, Any]:
    """Called on the engine's thread, between two steps."""
    return {"swapped": dict(engine.swap(slot, choice)), "explained": engine.explain()}


@define(eq=False, kw_only=True)
class Control:
    """Answers whoever may open the control socket: this machine's users, or for ipc its owner alone.

    Attributes:
        dispatch: the server's clients.
        reread_keys: looks at the folder of clients' keys at once.
        wire: how large messages may be.
    """

    dispatch: Dispatch
    reread_keys: Callable[[], None]
    wire: WireLimits
    _swapping: bool = field(default=False, init=False)

    def receive(self, frames: Frames, connection: bytes = b"") -> Frames | None:
        """Take a message and return its answer; None where the engine is asked: `answered` gives it.

        Nothing that the message holds raises.
        """
        message = Message("")
        try:
            (message,) = decode(frames, self.wire)
            if message.kind == "swap":
                self._swap(message, connection)
                return None
            answer = self._answer(message)
        except IntarsiaError as error:
            answer = error_message(error, message.id)
        except Exception as error:
            log.exception("a message of kind %.64r could not be handled", message.kind)
            answer = error_message(error, message.id)
        return encode(answer)

    def _answer(self, message: Message) -> Message:
        lifecycle, kind = self.dispatch.lifecycle, message.kind
        if kind == "reload":
            return Message("reloaded", message.id, 0, self._reload(message.body))
        if kind == "shutdown":
            now = message.body.get("now", False)
            if not isinstance(now, bool):
                raise wrong("now", now, "true or false")
            lifecycle.stop(now=now)
        elif kind == "drain":
            lifecycle.drain()
        elif kind == "pause":
            if lifecycle.draining:
                raise InvalidRequestError("pause: the server drains; resume it first")
            lifecycle.pause()
        elif kind == "resume":
            lifecycle.resume()
        elif kind == "ping":
            return Message("pong", message.id, 0, lifecycle.pong(message.body))
        elif kind != "status":
            known = ", ".join(KINDS)
            raise UnsupportedError(f"kind: {kind!r} is nothing that control knows; {known} are", field="kind")
        if kind != "status":
            log.info("control: %s; the server is %s", kind, lifecycle.state)
        return Message("status", message.id, 0, self.dispatch.figures())

    # --- swap ---------------------------------------------------------------------------------------------------------

    def _swap(self, message: Message, connection: bytes) -> None:
        """Ask the engine to replace a part; one swap at a time."""
        lifecycle, body = self.dispatch.lifecycle, message.body
        slot, use, options = body.get("slot"), body.get("use"), body.get("options", {})
        if not isinstance(slot, str):
            raise wrong("slot", slot, "a slot, such as scheduler")
        if not isinstance(use, str):
            raise wrong("use", use, "the key of a part, such as inflight")
        if not isinstance(options, dict):
            raise wrong("options", options, "a map of the part's options")
        if lifecycle.failure is not None:
            raise ExecutionError("the engine failed; nothing of it can be replaced")
        if not lifecycle.started:
            raise OverloadedError("the engine is starting; ask again when it is ready", retry_after_s=RETRY_S)
        if self._swapping:
            raise OverloadedError("swap: another one is under way", retry_after_s=RETRY_S)
        self._swapping = True
        question = partial(_swap_part, slot, Choice(use, options))
        lifecycle.loop.post(Ask(ControlAsked(connection, message.id), question, message=message))

    def answered(self, answered: Answered) -> tuple[bytes, Frames]:
        """Return where the engine's answer goes, and its frames."""
        asked: ControlAsked = answered.tag
        self._swapping = False
        if answered.error is not None:
            log.warning("control: a swap is refused: %s", answered.error)
            return asked.connection, encode(error_message(answered.error, asked.request_id))
        done = answered.answer["swapped"]
        self.dispatch.describe(answered.answer["explained"])
        log.info("control: swap: %s %s -> %s", done["slot"], done["before"], done["after"])
        return asked.connection, encode(Message("swapped", asked.request_id, 0, done))

    # --- reload -------------------------------------------------------------------------------------------------------

    def _reload(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Apply those options that can change while clients are here; name the others.

        Raises:
            InvalidRequestError: a value is wrong; then nothing has changed.
        """
        options = body.get("options", {})
        if not isinstance(options, dict):
            raise wrong("options", options, "a map of the frontend's options")
        limits = options.get("limits", {})
        if not isinstance(limits, dict):
            raise wrong("options.limits", limits, "a map")
        said = {key: value for key, value in options.items() if key != "limits"}
        said |= {f"limits.{key}": value for key, value in limits.items()}
        changes = [change for path, value in said.items() if (change := self._change(path, value)) is not None]
        for change in changes:
            change()
        self.reread_keys()
        applied = [path for path in said if _is_safe(path)]
        log.info("control: reload; applied: %s", ", ".join(applied) or "keys alone")
        return {"applied": applied, "restart": [path for path in said if not _is_safe(path)]}

    def _change(self, path: str, value: Any) -> Callable[[], None] | None:
        """Return what applies an option; None where that takes a restart."""
        if not _is_safe(path):
            return None
        if path == "log_level":
            if value not in _LEVELS:
                raise wrong(f"options.{path}", value, f"one of {', '.join(_LEVELS)}")
            return lambda: log.setLevel(value.upper())
        whole = path not in (*_SECONDS, "alive_timeout_s")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not 0 < value < 2**53:
            raise wrong(f"options.{path}", value, "a whole number from 1" if whole else "a number of seconds above 0")
        return lambda: self._set(path, value)

    def _set(self, path: str, value: Any) -> None:
        dispatch, sessions = self.dispatch, self.dispatch.sessions
        name = path.removeprefix("limits.")
        if name in (*_SECONDS, *_SESSION_COUNTS, "sessions"):
            sessions.limits = evolve(sessions.limits, **{name: value})
        elif name == "alive_timeout_s":
            dispatch.lifecycle.alive_timeout_s = value
        elif name == "requests_of_client":
            sessions.offered = evolve(sessions.offered, requests=value)
            self._admit(waiting_of_client=value)
        elif name == "requests":
            dispatch.max_requests = value
            self._admit(waiting=value)
        elif name == "questions_of_client":
            dispatch.questions.of_client = value
        else:
            assert name == "waiting_bytes"
            dispatch.questions.waiting_bytes = value

    def _admit(self, **changed: int) -> None:
        dispatch = self.dispatch
        dispatch.admission = evolve(dispatch.admission, **changed)
        dispatch.lifecycle.loop.post(Admit(dispatch.admission))


def _is_safe(path: str) -> bool:
    """Whether an option can change while clients are here: none was told of it, and no socket stands on it."""
    name = path.removeprefix("limits.")
    if path.startswith("limits."):
        return name in _LIMITS
    return name in (*_SECONDS, *_SESSION_COUNTS, "alive_timeout_s", "log_level")
