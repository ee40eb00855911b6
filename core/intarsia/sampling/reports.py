"""Log-probabilities of the raw distribution: of what was chosen, and of the likeliest.

They are taken before penalties, biases, processors, bans and filters. No report holds NaN or an infinity: an impossible
token (a raw logit of -inf) is left out of `top`, and is reported with `FLOOR` where it was chosen or prompted.

Shape legend: L rows of logits, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from intarsia.types import TokenLogprobs

#: The lowest log-probability that is reported.
FLOOR: Final = -9999.0


def report(logits_LV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probability of one token a row, and of the `num_top` likeliest; of equal ones the lower id first.

    Returns:
        One entry a row, or None where a row holds NaN or +inf, or nothing finite.
    """
    logprobs = torch.log_softmax(logits_LV[: len(token_ids)], dim=-1)
    if bool(logprobs.isnan().any()):
        return None
    best = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    rows = zip(token_ids, logprobs, best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprobs(
            token,
            max(float(row[token]), FLOOR),
            tuple((i, max(value, FLOOR)) for i, value in zip(ids, values, strict=True) if value > -torch.inf),
        )
        for token, row, ids, values in rows
    )
