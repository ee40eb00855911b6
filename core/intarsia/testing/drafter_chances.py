"""Verification by rejection, as a drafter's contract sees it: are the probabilities true, and do answers keep theirs?

Each answer is drawn from the model's distribution given the tokens before it, whatever was guessed. So for any weights
w of the ids that follow from those tokens, the sum of w[token] minus its mean under the distribution, over all tokens,
is near 0, as far as its variance says. The same holds of guesses and the probabilities that they come with.

Shape legend: V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define

from intarsia.testing.drafter_watch import Proposal
from intarsia.types import Completion, Draft

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["check_answers", "check_draws", "check_rows", "check_twins"]

#: How many standard deviations from 0 a sum may be: by chance one in two million is further.
_LIMIT = 5.0
#: What rounding in fp32, and logits of other batches, may change in a probability.
_ROUNDING = 1e-4


@define
class _Sum:
    """The sum of w[drawn] minus its mean under p."""

    total: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, w_V: NDArray[np.float64], p_V: NDArray[np.float64], drawn: int) -> None:
        """Add what was drawn from p (V,)."""
        mean = float(w_V @ p_V)
        self.total += float(w_V[drawn]) - mean
        self.variance += max(0.0, float((w_V * w_V) @ p_V) - mean * mean)
        self.count += 1

    def deviations(self) -> float:
        """Return how many standard deviations it is from 0."""
        return self.total / math.sqrt(self.variance) if self.variance > 1e-9 else 0.0


def _check(sums: Mapping[str, _Sum], says: str) -> None:
    for name, one in sums.items():
        found = one.deviations()
        assert abs(found) < _LIMIT, (
            f"{says}: weighed by {name}, {one.count} of them are {found:+.1f} standard deviations off"
        )


def _rows(draft: Draft) -> NDArray[np.float64] | None:
    """Return what the guesses of a draft are said to be drawn from (k, V), each row scaled to sum to 1."""
    if draft.probabilities is None:
        return None
    rows = np.asarray(draft.probabilities.detach().double().cpu().numpy())
    scaled: NDArray[np.float64] = rows / rows.sum(axis=1, keepdims=True)
    return scaled


def check_rows(proposals: Iterable[Proposal], num_ids: int) -> int:
    """Raise AssertionError where probabilities are none; return how many drafts have some."""
    count = 0
    for one in proposals:
        if one.draft.probabilities is None or not one.draft.token_ids:
            continue
        count += 1
        rows = np.asarray(one.draft.probabilities.detach().double().cpu().numpy())
        assert rows.ndim == 2 and rows.shape[0] == len(one.draft.token_ids) and rows.shape[1] >= num_ids, (
            f"probabilities of shape {rows.shape} for {len(one.draft.token_ids)} guesses out of {num_ids} ids"
        )
        assert np.isfinite(rows).all() and (rows >= 0).all(), "probabilities below 0, or not finite"
        assert np.abs(rows.sum(axis=1) - 1).max() < 1e-3, f"probabilities sum to {rows.sum(axis=1)}"
        own = rows[np.arange(len(rows)), list(one.draft.token_ids)]
        assert (own > 0).all(), "a guess was proposed that is said to have the probability 0"
    return count


def check_twins(proposals: Iterable[Proposal]) -> int:
    """Raise AssertionError where, after equal tokens in one call, other guesses have other probabilities.

    Returns:
        How many pairs were compared.
    """
    firsts: dict[tuple[int, tuple[int, ...]], tuple[int, NDArray[np.float64]]] = {}
    compared = 0
    for one in proposals:
        rows = _rows(one.draft)
        if rows is None or not len(rows):
            continue
        token, first = firsts.setdefault((one.step, one.token_ids), (one.draft.token_ids[0], rows[0]))
        off = float(np.abs(first - rows[0]).max())
        assert off < _ROUNDING, (
            f"after equal tokens {token} and {one.draft.token_ids[0]} were guessed, said to come from probabilities "
            f"that differ by {off:.2g}: they must not depend on the guess"
        )
        compared += first is not rows[0]
    return compared


def check_draws(proposals: Iterable[Proposal]) -> None:
    """Raise AssertionError where guesses do not have the distribution that they are said to be drawn from."""
    sums = {"probability": _Sum(), "rank": _Sum(), "id": _Sum()}
    for one in proposals:
        rows = _rows(one.draft)
        for q_V, token in zip(() if rows is None else rows, one.draft.token_ids, strict=False):
            sums["probability"].add(q_V, q_V, token)
            sums["rank"].add(np.argsort(np.argsort(q_V)).astype(np.float64), q_V, token)
            sums["id"].add((np.arange(len(q_V)) % 2).astype(np.float64), q_V, token)
    _check(sums, "guesses are not drawn from the probabilities that they come with")


def check_answers(completion: Completion, proposals: Sequence[Proposal], num_ids: int) -> None:
    """Raise AssertionError where answers at positions with guesses do not have the model's distribution.

    Args:
        completion: at temperature 1, unfiltered, with the log-probabilities of all ids.
        proposals: for its choices.
        num_ids: of the model.
    """
    names = ("the model's probability", "the guess's probability", "which of the two is larger", "the likeliest guess")
    sums = {name: _Sum() for name in names}
    for token, p_V, q_V in _guessed(completion, proposals, num_ids):
        sums["the model's probability"].add(p_V, p_V, token)
        sums["the guess's probability"].add(q_V, p_V, token)
        sums["which of the two is larger"].add((q_V > p_V).astype(np.float64), p_V, token)
        sums["the likeliest guess"].add((np.arange(num_ids) == q_V.argmax()).astype(np.float64), p_V, token)
    assert sums["the likeliest guess"].count, "nothing was guessed: there is nothing to verify"
    _check(sums, "answers do not have the model's distribution")


def _guessed(
    completion: Completion, proposals: Sequence[Proposal], num_ids: int
) -> Iterator[tuple[int, NDArray[np.float64], NDArray[np.float64]]]:
    """Yield the token, the model's probabilities (V,) and the guess's, where a guess was verified."""
    prompt = len(completion.prompt_token_ids)
    for one in proposals:
        choice = completion.choices[one.sequence_id[1]]
        rows = _rows(one.draft)
        for depth, guess in enumerate(one.draft.token_ids):
            turn = len(one.token_ids) - prompt + depth
            if turn >= len(choice.token_ids) or not 0 <= guess < num_ids:
                break
            entry: Any = (choice.logprobs or ())[turn]
            yield choice.token_ids[turn], _spread(entry.top, num_ids), _certain(rows, depth, guess, num_ids)
            if choice.token_ids[turn] != guess:
                break


def _certain(rows: NDArray[np.float64] | None, depth: int, guess: int, num_ids: int) -> NDArray[np.float64]:
    """Return a guess's probabilities (V,); 1 of itself where it has none."""
    known: NDArray[np.float64] = np.arange(num_ids) == guess if rows is None else rows[depth, :num_ids]
    return known.astype(np.float64)


def _spread(top: Iterable[tuple[int, float]], num_ids: int) -> NDArray[np.float64]:
    """Return log-probabilities of all ids as probabilities (V,)."""
    p_V = np.zeros(num_ids)
    for token, logprob in top:
        p_V[token] = math.exp(logprob)
    p_V /= p_V.sum()
    return p_V
