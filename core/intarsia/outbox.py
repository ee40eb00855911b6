"""Outputs, until whoever waits for them takes them."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from intarsia.observers import Observers
from intarsia.types import Output

#: finish_reason -> how requests that ended so are counted; all others `finished`.
_ENDS = {"abort": "aborted", "error": "failed"}


@define
class Outbox:
    """An engine's outputs: of requests whose `generate` or `stream` waits for them, and all others' for `step`.

    Attributes:
        ended: how many choices ended, by how.
    """

    _observers: Observers
    ended: dict[str, int] = field(init=False)
    _claimed: dict[str, list[Output]] = field(factory=dict, init=False)
    _unclaimed: list[Output] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.ended = dict.fromkeys(("finished", "aborted", "failed"), 0)

    @property
    def has_unclaimed(self) -> bool:
        """Whether there is something for `step`."""
        return bool(self._unclaimed)

    def claim(self, request_id: str) -> None:
        """Keep a request's outputs for who asks for them by its id."""
        self._claimed[request_id] = []

    def is_claimed(self, request_id: str) -> bool:
        """Whether somebody waits for a request's outputs."""
        return request_id in self._claimed

    def of(self, request_id: str) -> list[Output]:
        """Return a claimed request's outputs, to be taken from."""
        return self._claimed[request_id]

    def release(self, request_id: str) -> None:
        """Forget a claim, and what nobody has taken."""
        self._claimed.pop(request_id, None)

    def put(self, output: Output) -> None:
        """Take an output, and tell observers of a choice that ends."""
        self.keep([output])
        self.tell([output])

    def keep(self, outputs: Iterable[Output]) -> None:
        """Take outputs, in their order; observers are to be told yet."""
        for output in outputs:
            if output.finish_reason is not None:
                self.ended[_ENDS.get(output.finish_reason, "finished")] += 1
            self._claimed.get(output.request_id, self._unclaimed).append(output)

    def tell(self, outputs: Iterable[Output]) -> None:
        """Tell observers of choices that end."""
        for output in outputs:
            if output.finish_reason is not None:
                self._observers.tell("request_finished", output=output)

    def take(self) -> list[Output]:
        """Return what nobody claimed, and forget it."""
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def clear(self) -> None:
        """Forget all claims."""
        self._claimed.clear()
