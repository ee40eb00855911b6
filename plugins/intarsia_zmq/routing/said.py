"""What a choice has said so far, as counts and digests: enough to know it again, and no larger however much it was."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any

from attrs import define, evolve, field

from intarsia.types import Output

#: What an output brings, each with counts of its own: text may lag behind ids.
_PARTS = ("token_ids", "text", "logprobs", "prompt_logprobs")


@define(eq=False)
class Said:
    """What was said of one choice."""

    _counts: dict[str, int] = field(factory=lambda: dict.fromkeys(_PARTS, 0), init=False)
    #: chained over all ids, and over all text; log-probabilities of equal ids need not have equal bits
    _ids: Any = field(factory=blake2b, init=False, repr=False)
    _text: Any = field(factory=blake2b, init=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """How many ids there were."""
        return self._counts["token_ids"]

    @property
    def nothing(self) -> bool:
        """Whether nothing was said."""
        return not any(self._counts.values())

    def copy(self) -> Said:
        """Return what is the same, and goes on by itself."""
        made = Said()
        made._counts = dict(self._counts)
        made._ids, made._text = self._ids.copy(), self._text.copy()
        return made

    def add(self, output: Output) -> None:
        """Take what an output brings."""
        for part in _PARTS:
            self._counts[part] += len(getattr(output, part))
        if output.token_ids:
            self._ids.update(array("q", output.token_ids).tobytes())
        if output.text:
            self._text.update(output.text.encode("utf-8", "surrogatepass"))

    def reached(self, other: Said) -> bool:
        """Whether as much was said as of the other."""
        return self._counts == other._counts

    def differs(self, other: Said) -> bool:
        """Whether something else was said than of the other; found once as many ids, or characters, have come."""
        return (self._same(other, "token_ids") and self._ids.digest() != other._ids.digest()) or (
            self._same(other, "text") and self._text.digest() != other._text.digest()
        )

    def split(self, other: Said, output: Output) -> tuple[Output, Output]:
        """Cut an output where the other's end is reached; each part for itself."""
        head: dict[str, Any] = {}
        tail: dict[str, Any] = {}
        for part in _PARTS:
            said, left = getattr(output, part), other._counts[part] - self._counts[part]
            head[part], tail[part] = said[:left], said[left:]
        return Output(request_id=output.request_id, choice=output.choice, **head), evolve(output, **tail)

    def _same(self, other: Said, part: str) -> bool:
        return self._counts[part] == other._counts[part]


def brings_something(output: Output) -> bool:
    """Whether there is something in an output to pass on."""
    return output.finish_reason is not None or any(len(getattr(output, part)) for part in _PARTS)
