"""Log-probabilities of the raw distribution: of what was chosen, and of the likeliest.

They are of the logits before penalties, biases, processors, bans and filters. No report holds NaN or an infinity: an
impossible token (a raw logit of -inf) is left out of `top`, and has `FLOOR` where it was chosen or is of the prompt.

Shape legend: L rows of logits, V vocab, M tokens ranked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from attrs import frozen

from intarsia.sampling.ranking import rank
from intarsia.sampling.state import Task
from intarsia.types import SequenceId, TokenLogprobs

#: The lowest log-probability that is reported.
FLOOR: Final = -9999.0


@frozen(eq=False)
class Report:
    """The raw distribution at some positions, taken before anything changes their logits.

    Attributes:
        norms: per position the logarithm of the sum of exponentials; not finite where its logits are not.
        top: per position the likeliest ids and their log-probabilities.
    """

    _logits_LV: torch.Tensor
    norms: list[float]
    top: list[tuple[tuple[int, float], ...]]

    @classmethod
    def of(cls, logits_LV: torch.Tensor, nums_top: Sequence[int], *, copy: bool) -> Report:
        """Take rows of logits.

        Args:
            logits_LV: fp32.
            nums_top: how many of the likeliest to report, one number a row; more than the vocabulary is all of it.
            copy: whether the logits will change before `read`.
        """
        norms = _norms(logits_LV)
        top: list[tuple[tuple[int, float], ...]] = [()] * len(norms)
        listed = [row for row, norm in enumerate(norms) if nums_top[row] and math.isfinite(norm)]
        if listed:
            ranking = rank(logits_LV[listed], max(nums_top[row] for row in listed))
            for row, ids, logits in zip(listed, ranking.ids_LM.cpu(), ranking.logits_LM.cpu(), strict=True):
                pairs = zip(ids[: nums_top[row]].tolist(), logits[: nums_top[row]].tolist(), strict=True)
                top[row] = tuple((token, _floored(logit - norms[row])) for token, logit in pairs if logit > -torch.inf)
        return cls(logits_LV.clone() if copy else logits_LV, norms, top)

    def read(self, first: int, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        """Return the entries of what was chosen from position `first` on; None where the logits were not finite."""
        positions = range(first, first + len(token_ids))
        if not all(math.isfinite(self.norms[position]) for position in positions):
            return None
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._logits_LV.device).unsqueeze(1)
        logits = self._logits_LV[first : first + len(token_ids)].gather(1, ids).flatten().tolist()
        return tuple(
            TokenLogprobs(token, _floored(logit - self.norms[position]), self.top[position])
            for position, token, logit in zip(positions, token_ids, logits, strict=True)
        )


def report(logits_LV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> tuple[TokenLogprobs, ...] | None:
    """Return the log-probability of one token a row, and of the `num_top` likeliest, of equal ones the lower id first.

    Returns:
        One entry a row, or None where a row holds NaN or +inf, or nothing but -inf.
    """
    return Report.of(logits_LV, [num_top] * len(token_ids), copy=False).read(0, token_ids)


def report_tasks(tasks: Sequence[Task], logits_LV: torch.Tensor) -> tuple[Report, Mapping[SequenceId, int]]:
    """Take the logits of the tasks that report log-probabilities.

    Returns:
        The report of all their positions, and where in it each sequence's begin.
    """
    reporting = [task for task in tasks if task.state.params.logprobs is not None]
    if not reporting:  # as in most steps
        return Report(logits_LV, [], []), {}
    firsts: dict[SequenceId, int] = {}
    nums_top: list[int] = []
    rows: list[int] = []
    for task in reporting:
        firsts[task.sequence_id] = len(rows)
        rows += task.span
        nums_top += [task.state.params.logprobs or 0] * len(task.span)
    if len(rows) == len(logits_LV):
        return Report.of(logits_LV, nums_top, copy=any(task.state.edits for task in reporting)), firsts
    return Report.of(logits_LV[rows], nums_top, copy=False), firsts


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
