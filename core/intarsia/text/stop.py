"""Stop strings in a text that comes in parts."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import Factory, define, field, frozen


def _fallback(text: str) -> tuple[int, ...]:
    """Return, for each number of matched characters, how many of them stay matched when the next one differs."""
    fallback = [0, 0]
    for character in text[1:]:
        matched = fallback[-1]
        while matched and text[matched] != character:
            matched = fallback[matched]
        fallback.append(matched + (text[matched] == character))
    return tuple(fallback)


@frozen
class _Pattern:
    """A stop string with its failure function (Knuth, Morris, Pratt 1977)."""

    text: str
    fallback: tuple[int, ...] = field(init=False, default=Factory(lambda self: _fallback(self.text), takes_self=True))

    def advance(self, matched: int, character: str) -> int:
        """Return how many characters of the stop string the text ends with, one character later."""
        while matched and self.text[matched] != character:
            matched = self.fallback[matched]
        return matched + (self.text[matched] == character)


def _patterns(texts: Iterable[str]) -> tuple[_Pattern, ...]:
    return tuple(_Pattern(text) for text in texts)


@define
class StopStrings:
    """Finds the first stop string of a text and cuts the text there.

    A stop string takes effect at the character that completes it, whichever way the text is split; of several that end
    there the longest counts. Text that may be the beginning of a stop string is held back until it is known not to be.
    Characters can be passed: a stop string that one of them completes has no effect, though one that begins there and
    is completed later does. Work is linear in the text, for each stop string.

    Attributes:
        include_stop: leave the stop string at the end of the text.
    """

    _patterns: tuple[_Pattern, ...] = field(converter=_patterns)
    include_stop: bool = False
    _matched: list[int] = field(init=False)
    _held: str = field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        assert all(pattern.text for pattern in self._patterns), "a stop string has at least one character"
        self._matched = [0] * len(self._patterns)

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._patterns)

    def push(self, text: str, passed: int = 0) -> tuple[str, bool]:
        """Take the next part; return the text that is free to show, and whether a stop string ends it here.

        The first `passed` of these characters complete none.
        """
        known = self._held + text
        end, length = self._find(self._matched, text, passed)
        if length:
            end += len(self._held)
            self._held = ""
            return known[: end if self.include_stop else end - length], True
        keep = len(known) - max(self._matched, default=0)
        self._held = known[keep:]
        return known[:keep], False

    def completed_by(self, text: str, passed: int = 0) -> bool:
        """Return whether `push(text, passed)` would meet a stop string."""
        return self._find(list(self._matched), text, passed)[1] > 0

    def finish(self) -> str:
        """Return the text still held back: no stop string can come any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, matched: list[int], text: str, passed: int) -> tuple[int, int]:
        """Go through the text, updating `matched`; return end and length of the first stop string, or (0, 0)."""
        if not self._patterns:
            return 0, 0
        for end, character in enumerate(text, start=1):
            length = 0
            for index, pattern in enumerate(self._patterns):
                matched[index] = pattern.advance(matched[index], character)
                if matched[index] == len(pattern.text):
                    if end > passed:
                        length = max(length, matched[index])
                    else:
                        matched[index] = pattern.fallback[matched[index]]
            if length:
                return end, length
        return 0, 0
