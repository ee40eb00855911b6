"""The likeliest tokens of each row, in order, without sorting the vocabulary.

The vocabulary is dealt into groups. The k-th highest of the groups' maxima is at most the k-th highest logit; so the
groups whose maxima reach it hold the k highest and all that tie with them, and those few groups alone are sorted.

Shape legend: L rows of logits, V vocab, M tokens ranked, G groups, S tokens a group.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from attrs import frozen

_LOW_32: Final = 0xFFFFFFFF
_SIGNLESS: Final = 0x7FFFFFFF
_SIGN: Final = -(2**31)
#: Groups are small enough that there are so many for each token looked for, or nearly no group could be left out.
_GROUPS_A_TOKEN: Final = 4
_MOST_A_GROUP: Final = 64


@frozen(eq=False)
class Ranking:
    """Tokens by falling logit, of equal logits by rising id. What pads a row has a logit of -inf and the id V.

    Attributes:
        logits_LM: fp32.
        ids_LM: int64.
    """

    logits_LM: torch.Tensor
    ids_LM: torch.Tensor


def rank(logits_LV: torch.Tensor, count: int) -> Ranking:
    """Rank at least the `count` highest finite logits of each row and all that tie with the last of them.

    Args:
        logits_LV: fp32 without NaN; not changed.
        count: from 1; V or more ranks all.
    """
    num_rows, vocab = logits_LV.shape
    device = logits_LV.device
    group = min(vocab // (_GROUPS_A_TOKEN * count), _MOST_A_GROUP)
    if group < 2:
        every_V = torch.arange(vocab, device=device)
        rows = [
            _sorted(_keys(logits_1V, every_V)) for logits_1V in torch.split(logits_LV, 1)
        ]  # each fits a core's cache
        return _ranking(torch.cat(rows) if rows else torch.empty(0, vocab, dtype=torch.int64, device=device), vocab)
    maxima_LG = _maxima(logits_LV, group)
    # Where fewer groups than that hold a finite logit, the finite ones are all there is to rank.
    floor_L1 = maxima_LG.topk(count, dim=-1).values[:, -1:].clamp_min(_LOWEST)
    num_groups = int((maxima_LG >= floor_L1).sum(dim=-1).max())
    groups = maxima_LG.topk(num_groups, dim=-1, sorted=False).indices
    members = torch.arange(group, device=device) * maxima_LG.shape[1]
    ids = (groups.unsqueeze(-1) + members).flatten(1)
    logits = logits_LV.gather(1, ids.clamp_max(vocab - 1))
    # The few logits in question move together: a row's, one after another, then padding.
    in_question = (logits >= floor_L1) & (ids < vocab)
    rows_N, columns_N = in_question.nonzero(as_tuple=True)
    sizes_L = torch.bincount(rows_N, minlength=num_rows)
    places_N = torch.arange(len(rows_N), device=device) - (sizes_L.cumsum(0) - sizes_L)[rows_N]
    keys_LM = torch.full((num_rows, int(sizes_L.max())), _NOTHING, device=device)
    keys_LM[rows_N, places_N] = _keys(logits[rows_N, columns_N], ids[rows_N, columns_N])
    return _ranking(_sorted(keys_LM), vocab)


def _maxima(logits_LV: torch.Tensor, group: int) -> torch.Tensor:
    """Return the highest logit of each group (L, G). Group g holds the ids g, g + G, g + 2G, ..."""
    vocab = logits_LV.shape[1]
    num_groups = -(-vocab // group)
    full = vocab // num_groups
    maxima_LG = torch.unflatten(logits_LV[:, : full * num_groups], 1, (full, num_groups)).amax(dim=1)
    rest = vocab - full * num_groups
    if rest:
        maxima_LG[:, :rest] = torch.maximum(maxima_LG[:, :rest], logits_LV[:, full * num_groups :])
    return maxima_LG


_LOWEST: Final = torch.finfo(torch.float32).min
#: The key of no token: higher than every other.
_NOTHING: Final = 2**63 - 1


def _keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, no two equal, that rise as the logit falls and then as the id rises; none for -inf."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    falling = torch.where(bits < 0, bits & _SIGNLESS, ~bits)
    return ((falling.long() << 32) | ids).masked_fill_(logits == -torch.inf, _NOTHING)


def _sorted(keys_LM: torch.Tensor) -> torch.Tensor:
    """Sort each row. Keys are unique but for padding, so that every way to sort gives the same; numpy's is fastest."""
    if keys_LM.device.type == "cpu":
        return torch.from_numpy(np.sort(keys_LM.numpy(), axis=-1))
    return keys_LM.sort(dim=-1).values


def _ranking(keys_LM: torch.Tensor, vocab: int) -> Ranking:
    falling = (keys_LM >> 32).int()
    logits = torch.where(falling < 0, ~falling, falling | _SIGN).view(torch.float32)
    padding = keys_LM == _NOTHING
    return Ranking(logits.masked_fill_(padding, -torch.inf), (keys_LM & _LOW_32).masked_fill_(padding, vocab))
