"""Which tokens may be drawn, and with what weight: temperature, top-k, top-p, min-p, typical-p.

Each filter is over what those before it left. A row's weights are the same, bit for bit, whatever rows are beside it:
all sums are running sums along the ranking, to which padding adds zeros.

Shape legend: L rows of logits, V vocab, M tokens ranked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from attrs import frozen

from intarsia.sampling import arithmetic
from intarsia.sampling.ranking import Ranking, rank
from intarsia.sampling.settings import Settings

#: How many tokens are ranked first where it is not known how many are kept, and how many times more each time after.
_FIRST: Final = 64
_GROWTH: Final = 16
#: A ranking of more than one in so many ids is put in id order by writing it to the vocabulary, not by sorting.
_SPARSE: Final = 8
#: Rows whose weights are computed over the whole vocabulary at once: their float64 fits a core's cache.
_ROWS_AT_ONCE: Final = 2


@frozen(eq=False)
class Candidates:
    """What may be drawn, in id order.

    Attributes:
        rows: which rows of logits these are.
        weights_LM: float64, a row's probabilities up to a factor; 0 for what is not kept.
        ids_LM: their ids; None where the columns are the ids.
    """

    rows: tuple[int, ...]
    weights_LM: torch.Tensor
    ids_LM: torch.Tensor | None = None


def candidates(logits_LV: torch.Tensor, settings: Sequence[Settings]) -> Iterator[Candidates]:
    """Yield what may be drawn, row by row or several rows together, each row once.

    Args:
        logits_LV: fp32, with a finite maximum in every row; not changed.
        settings: one a row, none of them greedy.
    """
    vocab = logits_LV.shape[1]
    everything, limited, growing = [], [], []
    for row, setting in enumerate(settings):
        if 0 < setting.top_k < vocab:
            limited.append(row)
        elif setting.top_p < 1 or setting.min_p > 0 or setting.typical_p < 1:
            growing.append(row)
        else:
            everything.append(row)
    yield from _of_everything(logits_LV, settings, everything)
    yield from _limited(logits_LV, settings, limited)
    yield from _growing(logits_LV, settings, growing)


def _column(settings: Sequence[Settings], get: Callable[[Settings], float], device: torch.device) -> torch.Tensor:
    return torch.tensor([[get(setting)] for setting in settings], dtype=torch.float64, device=device)


def _taken(logits_LV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits_LV if len(rows) == len(logits_LV) else logits_LV[list(rows)]


def _of_everything(logits_LV: torch.Tensor, settings: Sequence[Settings], rows: Sequence[int]) -> Iterator[Candidates]:
    """Nothing is filtered: the weights are over the vocabulary."""
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        some = rows[first : first + _ROWS_AT_ONCE]
        temperatures = _column([settings[row] for row in some], lambda s: s.temperature, logits_LV.device)
        yield Candidates(tuple(some), arithmetic.weights(_taken(logits_LV, some), temperatures))


def _limited(logits_LV: torch.Tensor, settings: Sequence[Settings], rows: Sequence[int]) -> Iterator[Candidates]:
    """Rows with top_k: of their k likeliest and what ties with these, the other filters keep some."""
    if not rows:
        return
    chosen = [settings[row] for row in rows]
    ranking = rank(_taken(logits_LV, rows), max(s.top_k for s in chosen))
    last = torch.tensor([[s.top_k - 1] for s in chosen], device=logits_LV.device)
    lowest_L1 = ranking.logits_LM.gather(1, last.clamp_max(ranking.logits_LM.shape[1] - 1))
    logits_LM = ranking.logits_LM.masked_fill(ranking.logits_LM < lowest_L1, -torch.inf)
    yield _kept(rows, Ranking(logits_LM, ranking.ids_LM), chosen, None, logits_LV.shape[1])


def _growing(logits_LV: torch.Tensor, settings: Sequence[Settings], rows: Sequence[int]) -> Iterator[Candidates]:
    """Rows without top_k: rank more and more tokens, until what top_p and min_p keep is among them."""
    vocab = logits_LV.shape[1]
    totals_L1 = _totals(logits_LV, settings, rows)
    pending, count = list(range(len(rows))), _FIRST
    while pending:
        chosen = [settings[rows[i]] for i in pending]
        ranking = rank(_taken(logits_LV, [rows[i] for i in pending]), count)
        width = ranking.logits_LM.shape[1]
        every = width < count or width == vocab  # then there are no more to rank
        settled = [True] * len(pending) if every else _settled(ranking, chosen, totals_L1[pending], count)
        done = [place for place, is_settled in enumerate(settled) if is_settled]
        if done:
            part = Ranking(ranking.logits_LM[done], ranking.ids_LM[done])
            indices = [pending[place] for place in done]
            yield _kept([rows[i] for i in indices], part, [chosen[place] for place in done], totals_L1[indices], vocab)
        pending = [i for i, is_settled in zip(pending, settled, strict=True) if not is_settled]
        count *= _GROWTH


def _settled(ranking: Ranking, settings: Sequence[Settings], totals_L1: torch.Tensor, count: int) -> list[bool]:
    """Return whether a ranking of `count` tokens holds all that each row keeps."""
    logits_LM = ranking.logits_LM[:, :count]
    weights_LM = arithmetic.weights(logits_LM, _column(settings, lambda s: s.temperature, logits_LM.device))
    settled_L1 = logits_LM[:, -1:] == -torch.inf
    settled_L1 |= weights_LM.cumsum(dim=-1)[:, -1:] >= _edges(settings, totals_L1)
    settled_L1 |= weights_LM[:, -1:] < _column(settings, lambda s: s.min_p, logits_LM.device)
    found: list[bool] = settled_L1.flatten().tolist()
    return found


def _totals(logits_LV: torch.Tensor, settings: Sequence[Settings], rows: Sequence[int]) -> torch.Tensor:
    """Return the sum of each row's weights over the vocabulary (L, 1), where top_p needs it; else 1."""
    totals_L1 = torch.ones(len(rows), 1, dtype=torch.float64, device=logits_LV.device)
    for i, row in enumerate(rows):
        if settings[row].top_p < 1:
            temperature = _column([settings[row]], lambda s: s.temperature, logits_LV.device)
            totals_L1[i] = arithmetic.totals(arithmetic.weights(logits_LV[row : row + 1], temperature))[0]
    return totals_L1


def _edges(settings: Sequence[Settings], totals_L1: torch.Tensor) -> torch.Tensor:
    """Return the weight that the kept ones of each row sum to at least; infinite where top_p keeps all."""
    return _column(settings, lambda s: s.top_p if s.top_p < 1 else torch.inf, totals_L1.device) * totals_L1


def _kept(
    rows: Sequence[int],
    ranking: Ranking,
    settings: Sequence[Settings],
    totals_L1: torch.Tensor | None,
    vocab: int,
) -> Candidates:
    """Apply top_p, min_p and typical_p along a ranking, and return what they keep in id order.

    Args:
        rows: which rows of logits these are.
        ranking: enough of each row that the rest is not kept.
        settings: one a row.
        totals_L1: what top_p is a share of; None is the ranking's own sum.
        vocab: how many ids there are.
    """
    device = ranking.ids_LM.device
    weights_LM = arithmetic.weights(ranking.logits_LM, _column(settings, lambda s: s.temperature, device))
    if any(s.top_p < 1 for s in settings):
        sums_LM = weights_LM.cumsum(dim=-1)
        edges_L1 = _edges(settings, sums_LM[:, -1:] if totals_L1 is None else totals_L1)
        weights_LM[:, 1:].masked_fill_(sums_LM[:, :-1] >= edges_L1, 0.0)
    if any(s.min_p > 0 for s in settings):
        weights_LM.masked_fill_(weights_LM < _column(settings, lambda s: s.min_p, device), 0.0)
    typical = [i for i, s in enumerate(settings) if s.typical_p < 1]
    if typical:
        mass_L1 = _column([settings[i] for i in typical], lambda s: s.typical_p, device)
        weights_LM[typical] = _typical(weights_LM[typical], mass_L1)
    if weights_LM.shape[1] > vocab // _SPARSE:
        every_LV = weights_LM.new_zeros(len(rows), vocab + 1).scatter_(1, ranking.ids_LM, weights_LM)
        return Candidates(tuple(rows), every_LV[:, :vocab])
    order = ranking.ids_LM.argsort(dim=-1)
    return Candidates(tuple(rows), weights_LM.gather(1, order), ranking.ids_LM.gather(1, order))


def _typical(weights_LM: torch.Tensor, mass_L1: torch.Tensor) -> torch.Tensor:
    """Keep the tokens whose information is nearest to the entropy, up to a mass, and those tied with the last of them.

    Meister et al. 2022, "Locally Typical Sampling".
    """
    probabilities = weights_LM / weights_LM.cumsum(dim=-1)[:, -1:]
    there = probabilities > 0
    information = -arithmetic.log(torch.where(there, probabilities, 1.0))
    entropy = (probabilities * information).cumsum(dim=-1)[:, -1:]
    distances, order = (information - entropy).abs().masked_fill(~there, torch.inf).sort(dim=-1, stable=True)
    last = (probabilities.gather(1, order).cumsum(dim=-1) < mass_L1).sum(dim=-1, keepdim=True)
    furthest = distances.gather(1, last.clamp_max(distances.shape[1] - 1))
    return weights_LM.masked_fill((information - entropy).abs() > furthest, 0.0)
