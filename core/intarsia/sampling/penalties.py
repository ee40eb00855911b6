"""Penalties on tokens that were there before, and biases.

Shape legend: L rows of logits, V vocab, N pairs of row and id.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from intarsia.sampling.state import Task


def penalise(tasks: Sequence[Task], logits_LV: torch.Tensor) -> None:
    """Change logits in place: repetition (Keskar et al. 2019) over prompt and answer, the others over the answer alone.

    With logit l, repetition penalty r, and c times in the answer: l / r where l is positive, else l * r; from that
    frequency_penalty * c is taken, and presence_penalty where c is not 0. Drafts before a position are of the answer.
    """
    parts = []
    for task in tasks:
        settings = task.state.settings
        if settings.penalises:
            numbers = (settings.repetition_penalty, settings.frequency_penalty, settings.presence_penalty)
            parts += [(index, *task.state.history.counts(drafts), numbers) for index, drafts in task.positions()]
    if not parts:
        return
    sizes = [len(ids) for _, ids, _, _ in parts]
    rows_N, ids_N, counts_N = (
        torch.from_numpy(array).to(logits_LV.device)
        for array in (
            np.repeat([index for index, _, _, _ in parts], sizes),
            np.concatenate([ids for _, ids, _, _ in parts]),
            np.concatenate([counts for _, _, counts, _ in parts]),
        )
    )
    numbers_3N = torch.from_numpy(np.repeat([numbers for _, _, _, numbers in parts], sizes, axis=0).T.copy())
    repetition_N, frequency_N, presence_N = numbers_3N.to(logits_LV.device)
    before_N = logits_LV[rows_N, ids_N].double()
    after_N = torch.where(before_N > 0, before_N / repetition_N, before_N * repetition_N)
    after_N = after_N - frequency_N * counts_N - presence_N * (counts_N > 0)
    logits_LV[rows_N, ids_N] = after_N.float()


def add_biases(tasks: Sequence[Task], logits_LV: torch.Tensor) -> None:
    """Add each sequence's logit_bias at each of its positions, in place."""
    parts = [
        (index, t.state.bias_ids_N, t.state.biases_N) for t in tasks if len(t.state.bias_ids_N) for index in t.span
    ]
    if not parts:
        return
    rows_N, ids_N, biases_N = (
        torch.from_numpy(array).to(logits_LV.device)
        for array in (
            np.repeat([index for index, _, _ in parts], [len(ids) for _, ids, _ in parts]),
            np.concatenate([ids for _, ids, _ in parts]),
            np.concatenate([biases for _, _, biases in parts]),
        )
    )
    logits_LV[rows_N, ids_N] = (logits_LV[rows_N, ids_N].double() + biases_N).float()
