"""What a sequence holds so far, and how often: kept as tokens come, never counted again.

Shape legend: D distinct ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field


@define
class History:
    """The ids of a sequence and, where penalties need them, its distinct ids with their counts in the answer.

    Attributes:
        token_ids: prompt and answer.
        num_prompt: how many of them are the prompt.
        counted: whether ids are counted.
        num_ids: ids from here on have no logits, and are not counted.
    """

    token_ids: list[int]
    num_prompt: int
    counted: bool
    num_ids: int
    _columns: dict[int, int] = field(factory=dict, init=False)
    _ids_D: np.ndarray = field(init=False)
    _counts_D: np.ndarray = field(init=False)

    def __attrs_post_init__(self) -> None:
        prompt = np.array(self.token_ids[: self.num_prompt] if self.counted else [], dtype=np.int64)
        distinct = np.unique(prompt[prompt < self.num_ids])
        self._columns = {token: column for column, token in enumerate(distinct.tolist())}
        room = np.zeros(64, dtype=np.int64)
        self._ids_D, self._counts_D = np.concatenate((distinct, room)), np.zeros(len(distinct) + 64, dtype=np.int64)
        if self.counted:
            for token in self.token_ids[self.num_prompt :]:
                self._count(token)

    @property
    def num_answer(self) -> int:
        """How many tokens the answer has."""
        return len(self.token_ids) - self.num_prompt

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what was chosen."""
        self.token_ids += token_ids
        if self.counted:
            for token in token_ids:
                self._count(token)

    def _count(self, token: int) -> None:
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._ids_D):
            self._ids_D = np.concatenate((self._ids_D, np.zeros_like(self._ids_D)))
            self._counts_D = np.concatenate((self._counts_D, np.zeros_like(self._counts_D)))
        self._ids_D[column] = token
        self._counts_D[column] += 1

    def counts(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct ids of prompt, answer and these drafts (D,), and their counts in answer and drafts (D,).

        What is returned may share memory with this history: read it before more tokens come.
        """
        size = len(self._columns)
        ids_D, counts_D = self._ids_D[:size], self._counts_D[:size]
        if not drafts:
            return ids_D, counts_D
        counts_D = counts_D.copy()
        new: dict[int, int] = {}
        for token in drafts:
            column = self._columns.get(token)
            if column is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts_D[column] += 1
        return (
            np.concatenate((ids_D, np.fromiter(new.keys(), np.int64, len(new)))),
            np.concatenate((counts_D, np.fromiter(new.values(), np.int64, len(new)))),
        )
