"""Log-probabilities of the raw distribution: of what was chosen, and of the likeliest.

They are of the logits before penalties, biases, processors, bans and filters. No report holds NaN or an infinity: an
impossible token (a raw logit of -inf) is left out of `top`, and has `FLOOR` where it was chosen or is of the prompt.

Shape legend: L rows of logits, V vocab, M tokens ranked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from attrs import frozen

from intarsia.sampling.ranking import rank
from intarsia.types import TokenLogprobs

#: The lowest log-probability that is reported.
FLOOR: Final = -9999.0


@frozen(eq=False)
class Report:
    """The raw distribution at a row's positions, taken before anything changes its logits.

    Attributes:
        logits_LV: the raw logits.
        norms: per position the logarithm of the sum of exponentials.
        top: per position the likeliest ids and their log-probabilities.
    """

    logits_LV: torch.Tensor
    norms: list[float]
    top: list[tuple[tuple[int, float], ...]]

    @classmethod
    def of(cls, logits_LV: torch.Tensor, num_top: int | None) -> Report:
        """Take some rows of logits; of `num_top` more than there are, all are reported."""
        norms = _norms(logits_LV)
        top: list[tuple[tuple[int, float], ...]] = [()] * len(norms)
        wanted = min(num_top or 0, logits_LV.shape[1])
        if wanted and np.isfinite(norms).all():
            ranking = rank(logits_LV, wanted)
            rows = zip(ranking.ids_LM[:, :wanted].tolist(), ranking.logits_LM[:, :wanted].tolist(), norms, strict=True)
            top = [
                tuple(
                    (token, _floored(logit - norm))
                    for token, logit in zip(ids, logits, strict=True)
                    if logit > -torch.inf
                )
                for ids, logits, norm in rows
            ]
        return cls(logits_LV.clone(), norms, top)

    def read(self, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        """Return the entries of what was chosen at the first positions; None where their logits were not finite."""
        if not np.isfinite(self.norms[: len(token_ids)]).all():
            return None
        rows = torch.arange(len(token_ids), device=self.logits_LV.device)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self.logits_LV.device)
        chosen = self.logits_LV[rows, ids].tolist()
        return tuple(
            TokenLogprobs(token, _floored(logit - norm), top)
            for token, logit, norm, top in zip(token_ids, chosen, self.norms, self.top, strict=False)
        )


def report(logits_LV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probability of one token a row, and of the `num_top` likeliest, of equal ones the lower id first.

    Returns:
        One entry a row, or None where a row holds NaN or +inf, or nothing but -inf.
    """
    return Report.of(logits_LV, num_top).read(token_ids)


def _floored(logprob: float) -> float:
    return max(logprob, FLOOR)


def _norms(logits_LV: torch.Tensor) -> list[float]:
    """Return the logarithm of the sum of exponentials of each row, not finite where its logits are not."""
    if logits_LV.device.type != "cpu":
        norms: list[float] = logits_LV.double().logsumexp(dim=-1).tolist()
        return norms
    found = []
    with np.errstate(invalid="ignore", divide="ignore"):
        for logits_V in logits_LV.numpy():
            best = logits_V.max()
            found.append(float(best) + float(np.log(np.exp(logits_V - best).sum(dtype=np.float64))))
    return found
