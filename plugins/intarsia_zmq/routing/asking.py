"""Questions of clients that a replica answers: `tokenize`, `detokenize` and `stats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from intarsia.errors import ExecutionError, IntarsiaError, InvalidRequestError, OverloadedError
from intarsia_zmq.calls import ConnectionLostError, Event
from intarsia_zmq.errors import DrainingError
from intarsia_zmq.handover import Answered, Ask
from intarsia_zmq.routing.fleet import Fleet

#: They are answered between an engine's steps.
_PATIENCE_S = 30.0
_RETRY_S = 1.0
#: Not the question's fault: another replica may answer.
_ELSEWHERE = (ConnectionLostError, DrainingError, ExecutionError, OverloadedError)


@define(eq=False, kw_only=True)
class Asking:
    """Hands questions to replicas, each to another where one is lost.

    Attributes:
        fleet: the replicas.
        report: takes answers.
        num_bytes: of questions that wait.
    """

    fleet: Fleet
    report: Callable[[Answered], None]
    num_bytes: int = field(default=0, init=False)

    def ask(self, ask: Ask) -> None:
        """Have a question answered; of `stats` the router knows the answer."""
        if ask.message.kind == "stats":
            self.report(Answered(ask.tag, {"engine": self.fleet.figures(), "replicas": self.fleet.listed()}))
            return
        self.num_bytes += ask.num_bytes
        self._ask(ask, frozenset())

    def _ask(self, ask: Ask, tried: frozenset[str]) -> None:
        replica = self.fleet.any(tried)
        if replica is None:
            trouble = f"no replica answers: {self.fleet.trouble()}"
            self._answer(ask, OverloadedError(trouble, retry_after_s=_RETRY_S))
            return
        name = replica.name

        def take(event: Event) -> None:
            if isinstance(event, _ELSEWHERE):
                self._ask(ask, tried | {name})
            else:
                self._answer(ask, event)

        try:
            replica.ask(ask.message.kind, ask.message.body, take, _PATIENCE_S)
        except InvalidRequestError as error:
            self._answer(ask, error)
        except ConnectionLostError as error:
            take(error)

    def _answer(self, ask: Ask, event: Event) -> None:
        self.num_bytes -= ask.num_bytes
        if isinstance(event, IntarsiaError):
            self.report(Answered(ask.tag, error=event))
        else:
            assert isinstance(event, Mapping)
            self.report(Answered(ask.tag, event))
