"""The likeliest tokens of each row, in order, without sorting the vocabulary.

The vocabulary is dealt into groups. The k-th highest of the groups' maxima is at most the k-th highest logit; so the
groups whose maxima reach it hold the k highest and all that tie with them, and those few groups alone are sorted.

Shape legend: L rows of logits, V vocab, M tokens ranked, G groups, S tokens a group.
"""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen

_LOW_32: Final = 0xFFFFFFFF
_SIGNLESS: Final = 0x7FFFFFFF
#: Groups are small enough that there are so many for each token looked for, or nearly no group could be left out.
_GROUPS_A_TOKEN: Final = 8
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
    vocab = logits_LV.shape[1]
    group = min(vocab // (_GROUPS_A_TOKEN * count), _MOST_A_GROUP)
    if group < 2:
        ids_V = torch.arange(vocab, device=logits_LV.device)
        keys = _keys(logits_LV, ids_V.expand_as(logits_LV))
        return _ranking(
            keys.masked_fill_(logits_LV == -torch.inf, _NOTHING).sort(dim=-1, descending=True).values, vocab
        )
    maxima_LG = _maxima(logits_LV, group)
    floor_L1 = maxima_LG.topk(count, dim=-1).values[:, -1:]
    # Where fewer groups than that hold a finite logit, the finite ones are all there is to rank.
    floor_L1 = floor_L1.clamp_min(torch.finfo(torch.float32).min)
    num_groups = int((maxima_LG >= floor_L1).sum(dim=-1).max())
    groups = maxima_LG.topk(num_groups, dim=-1, sorted=False).indices
    members = torch.arange(group, device=groups.device) * maxima_LG.shape[1]
    ids = (groups.unsqueeze(-1) + members).flatten(1)
    within = ids.clamp_max(vocab - 1)
    logits = logits_LV.gather(1, within)
    in_question = (logits >= floor_L1) & (ids < vocab)
    keys = _keys(logits, within).masked_fill_(~in_question, _NOTHING)
    return _ranking(keys.topk(int(in_question.sum(dim=-1).max()), dim=-1).values, vocab)


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


#: Lower than every key.
_NOTHING: Final = -(2**63)


def _keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys, no two equal, that rise with the logit and then with a falling id."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    ordered = torch.where(bits < 0, bits ^ _SIGNLESS, bits)
    return (ordered.long() << 32) | (_LOW_32 - ids)


def _ranking(keys_LM: torch.Tensor, vocab: int) -> Ranking:
    ordered = (keys_LM >> 32).int()
    logits = torch.where(ordered < 0, ordered ^ _SIGNLESS, ordered).view(torch.float32)
    padding = keys_LM == _NOTHING
    ids = _LOW_32 - (keys_LM & _LOW_32)
    return Ranking(logits.masked_fill(padding, -torch.inf), ids.masked_fill(padding, vocab))
