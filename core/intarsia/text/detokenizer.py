"""The text of one sequence, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from attrs import define, field

from intarsia.text.decoding import Decoding


@define
class Detokenizer:
    """Turns the ids of one sequence into text as they come.

    What it returns is settled: no later id changes it, so it never holds half a character. The joined output is
    `Tokenizer.decode` of all ids, for any ids. At most LONGEST_BYTE_RUN bytes are held back, for models that spell
    rare characters as byte tokens; with byte-level models at most 3.

    Attributes:
        pieces_of: the tokens of ids as the vocabulary spells them, without those that leave no text.
    """

    _decoding: Decoding
    _pieces_of: Callable[[Iterable[int]], Sequence[str]]
    _states: tuple[Any, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._states = self._decoding.begin()

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids and return the text that they settle."""
        text, self._states = self._decoding.run(self._states, self._pieces_of(ids), final=False)
        return text

    def peek(self) -> str:
        """Return what `finish` would return now."""
        return self._decoding.run(self._states, (), final=True)[0]

    def finish(self) -> str:
        """Return the rest of the text, half a character as U+FFFD. Nothing may be pushed after it."""
        text, self._states = self._decoding.run(self._states, (), final=True)
        return text
