"""Earlier answers of an engine, apart by salt, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from intarsia_speculative.automaton import END, Automaton

#: Parts that the memory is dropped in.
_PARTS = 4


@define(eq=False)
class Memory:
    """Automata of earlier answers. Nothing can be taken out of an automaton, so whole ones are dropped, oldest first.

    Attributes:
        max_tokens: that are kept, over all salts.
    """

    max_tokens: int
    _parts: list[tuple[str, Automaton]] = field(factory=list, init=False)
    _by_salt: dict[str, list[Automaton]] = field(factory=dict, init=False)

    @property
    def num_tokens(self) -> int:
        """How many are kept."""
        return sum(part.num_tokens for _, part in self._parts)

    def of(self, salt: str) -> Sequence[Automaton]:
        """Return the automata of a salt's answers, oldest first."""
        return self._by_salt.get(salt, ())

    def add(self, salt: str, token_ids: Sequence[int]) -> None:
        """Keep an answer; of a very long one the end."""
        kept = token_ids[-max(self.max_tokens // _PARTS - 1, 0) :]
        if not kept or self.max_tokens < _PARTS * 2:
            return
        part = self._open(salt, len(kept) + 1)
        part.extend(kept)
        part.extend((END,))
        while self.num_tokens > self.max_tokens:
            self._drop()

    def _open(self, salt: str, num_tokens: int) -> Automaton:
        """Return the salt's newest automaton, or a new one where that is full."""
        parts = self._by_salt.setdefault(salt, [])
        if not parts or parts[-1].num_tokens + num_tokens > self.max_tokens // _PARTS:
            parts.append(Automaton())
            self._parts.append((salt, parts[-1]))
        return parts[-1]

    def _drop(self) -> None:
        salt, part = self._parts.pop(0)
        self._by_salt[salt].remove(part)
        if not self._by_salt[salt]:
            del self._by_salt[salt]
