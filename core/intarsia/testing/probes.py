"""A drafter, a logits processor and a runner of suites, which do what they are told, and note what they hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import define, field

from intarsia.ops import COLLECTIVES
from intarsia.protocols import Drafter, DraftRequest, LogitsProcessor, SequenceProcessor, StepCost, Verified
from intarsia.testing.composing import offered
from intarsia.types import Draft, Entered, Provider, SamplingParams, SequenceId

if TYPE_CHECKING:
    import torch

__all__ = ["PROBE", "ProbeDrafter", "ProbeProcessor", "failing_runner", "probing"]

#: What configs and requests call these parts.
PROBE = "probe"


@define(eq=False)
class ProbeDrafter(Drafter):
    """Proposes what a function says of a request.

    Attributes:
        says: the function; what it raises, the drafter raises.
        live: sequences that have entered and were not forgotten.
        asked: requests so far.
        verified: what it heard of its drafts.
        stopped: how often it was stopped.
    """

    says: Callable[[DraftRequest], Sequence[int]]
    live: set[SequenceId] = field(factory=set, init=False)
    asked: list[DraftRequest] = field(factory=list, init=False)
    verified: list[Verified] = field(factory=list, init=False)
    stopped: int = field(default=0, init=False)

    def enter(self, entered: Entered) -> None:
        """Take note."""
        self.live.add(entered.sequence_id)

    def forget(self, sequence_id: SequenceId) -> None:
        """Take note."""
        self.live.discard(sequence_id)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Say it."""
        self.asked += requests
        return [Draft(tuple(self.says(request))) for request in requests]

    def observe(self, verified: Sequence[Verified], cost: StepCost) -> None:
        """Take note."""
        assert cost.num_rows >= len(verified)
        self.verified += verified

    def stop(self) -> None:
        """Take note."""
        self.stopped += 1


@define(eq=False)
class ProbeProcessor(LogitsProcessor):
    """Adds to a logit of requests that ask for it, or fails: `{"id": 3}`, `{"fails": "open"}`, `{"fails": "process"}`.

    Attributes:
        seen: ids before each position that was processed.
    """

    seen: list[tuple[int, ...]] = field(factory=list, init=False)

    def applies(self, params: SamplingParams) -> bool:
        """Those that name it."""
        return PROBE in params.logits_processors

    def open(self, params: SamplingParams, num_prompt: int) -> SequenceProcessor:
        """Begin with a sequence, or fail."""
        del num_prompt
        asked = params.logits_processors[PROBE]
        if asked.get("fails") == "open":
            raise RuntimeError("the suite's processor fails to open")
        return _Push(asked, self.seen)


@define(eq=False)
class _Push:
    asked: dict[str, Any]
    seen: list[tuple[int, ...]]

    def process(self, token_ids: Sequence[int], logits_V: torch.Tensor) -> None:
        """Push one id where the sequence has an odd number of tokens."""
        self.seen.append(tuple(token_ids))
        if self.asked.get("fails") == "process":
            raise RuntimeError("the suite's processor fails to process")
        if len(token_ids) % 2:
            logits_V[self.asked["id"]] += 1000


def probing(*, drafter: ProbeDrafter | None = None, processor: ProbeProcessor | None = None) -> object:
    """Return a plugin that offers these under the key `PROBE`."""
    parts = {"drafter": drafter, "logits_processors": processor}
    return offered(**{slot: _provider(part) for slot, part in parts.items() if part is not None})


def _provider(part: Any) -> Provider:
    return Provider(key=PROBE, summary="of a suite", build=lambda _: part)


def failing_runner() -> object:
    """Return a plugin whose runner `PROBE` fails as it is built, once weights are loaded."""

    def build(_: Any) -> NoReturn:
        raise RuntimeError("the suite's runner fails to build")

    able = frozenset({*COLLECTIVES, "stages"})  # so that executors over ranks are not refused it
    return offered(runner=Provider(key=PROBE, summary="fails to build", parallel=able, build=build))
