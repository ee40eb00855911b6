"""Choosing on the device: for rows of which the host need not see the logits, ids stay where they are chosen.

The next step takes them from there, and the host reads them while that runs. What is chosen is what `Sampler.choose`
chooses.

Shape legend: L rows of logits, V vocab, N rows that are drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import field, frozen

from intarsia.sampling.arithmetic import FAILED, likeliest_ids
from intarsia.sampling.drawing import SampleRows, columns
from intarsia.sampling.picking import failure
from intarsia.sampling.random import CHOOSE, uniforms
from intarsia.sampling.state import State
from intarsia.types import Row, RowResult, SequenceId, Want


def to_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy from the host without waiting for what the device is at."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def can_pick(row: Row, state: State, *, draws: bool) -> bool:
    """Whether the device alone can choose a row's token.

    Args:
        row: of the plan.
        state: of its sequence.
        draws: whether a kernel draws tokens.
    """
    if state.error is not None or row.num_drafts or (state.params.prompt_logprobs is not None and state.choice == 0):
        return False
    if row.want is Want.NONE:
        return True
    settings = state.settings
    chooses = settings.is_greedy or (draws and settings.typical_p >= 1)
    return chooses and not state.edits and state.params.logprobs is None


@frozen(eq=False)
class Picked:
    """What a step chose on the device.

    Attributes:
        states: of the sequences that a token was chosen for, in the order of the rows of logits.
        ids_L: int64, FAILED where nothing could be chosen.
    """

    states: Mapping[SequenceId, State]
    ids_L: torch.Tensor
    _host: tuple[torch.Tensor, torch.Tensor] = field(repr=False)

    @classmethod
    def of(cls, states: Mapping[SequenceId, State], ids_L: torch.Tensor, best_L: torch.Tensor) -> Picked:
        """Begin to copy ids and highest logits to the host: they are there when the device's queue has come so far."""
        host = []
        for chosen in (ids_L, best_L):
            pinned = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=chosen.device.type != "cpu")
            host.append(pinned.copy_(chosen, non_blocking=True))
        return cls(states, ids_L, (host[0], host[1]))

    def pending(self, sequence_ids: Sequence[SequenceId]) -> torch.Tensor:
        """Return the ids that were chosen for sequences, on the device; 0 where nothing could be: that row is void."""
        index = {sequence_id: i for i, sequence_id in enumerate(self.states)}
        rows = torch.tensor([index[sequence_id] for sequence_id in sequence_ids], dtype=torch.int64)
        return self.ids_L[to_device(rows, self.ids_L.device)].clamp(min=0)

    def settle(self, rows: Sequence[Row]) -> list[RowResult]:
        """Return the results of the step's rows, and let their sequences take what was chosen."""
        found = {}
        for (sequence_id, state), token, best in zip(
            self.states.items(), self._host[0].tolist(), self._host[1].tolist(), strict=True
        ):
            if token == FAILED:
                found[sequence_id] = RowResult(sequence_id=sequence_id, error=failure(best))
            else:
                state.extend([token])
                found[sequence_id] = RowResult(sequence_id=sequence_id, token_ids=(token,))
        return [found.get(row.sequence_id) or RowResult(sequence_id=row.sequence_id) for row in rows]


def pick(
    rows: Sequence[Row],
    states: Sequence[State],
    logits_LV: torch.Tensor,
    sample_rows: SampleRows | None,
) -> Picked:
    """Choose a token after each row, and wait for nothing.

    Args:
        rows: L that want a token, of which `can_pick` said so.
        states: of their sequences.
        logits_LV: fp32, of ids that have tokens.
        sample_rows: the kernel that draws.
    """
    ids_L, best_L = likeliest_ids(logits_LV)
    drawn = [i for i, state in enumerate(states) if not state.settings.is_greedy]
    if drawn:
        assert sample_rows is not None, "without a kernel the host draws"
        device, some = logits_LV.device, [states[i] for i in drawn]
        # Of what is chosen on the device the sequence does not know yet: the position is the row's.
        positions = [rows[i].start + len(rows[i].token_ids) for i in drawn]
        numbers = uniforms([s.seed for s in some], [s.choice for s in some], positions, CHOOSE)
        settings = [*columns([s.settings for s in some], logits_LV.shape[1]), torch.from_numpy(numbers)]
        rows_N = to_device(torch.tensor(drawn, dtype=torch.int64), device)
        logits_NV = logits_LV if len(drawn) == len(states) else logits_LV[rows_N]
        ids_N = sample_rows(logits_NV, *(to_device(column, device) for column in settings))
        ids_L = ids_L.index_copy(0, rows_N, ids_N)
    return Picked.of({row.sequence_id: state for row, state in zip(rows, states, strict=True)}, ids_L, best_L)
