"""The collective ops of ranks that hold slices of the same layers.

Without sequence parallelism a block's partial outputs are summed over ranks (all-reduce), and each rank keeps the
activations of all tokens. With it, the sum leaves each rank its own tokens (reduce-scatter), on which norms and
residuals work; before the next block they are gathered (all-gather). The two together move what an all-reduce does
(Korthikanti et al. 2022).

Where the number of tokens does not divide, the last ranks' shares are filled up with zeros, which nothing reads.

Shape legend: T tokens, m tokens of a rank, L rows of logits, E embed, V vocab, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field

from intarsia.types import Demand
from intarsia_parallel.traffic import Traffic

#: Of what is sent for a row whose likeliest id is all that is needed: the id and its logit, both exact in float64.
_PAIR = torch.float64


@define(eq=False)
class TensorGroup:
    """One rank's ends of the collectives. Its calls are synchronous; a peer that is gone makes them raise.

    Attributes:
        rank, size: this one's place among those that hold slices of the same layers.
        sequence: whether activations are sharded along tokens.
        first_id, num_rows: rows of the vocabulary here, padding included.
        vocab_size: of the whole model.
        num_ids: ids from here on have no token, and are never chosen.
        traffic: what was asked of the group so far.
    """

    rank: int
    size: int
    sequence: bool
    first_id: int
    num_rows: int
    vocab_size: int
    num_ids: int
    traffic: Traffic = field(factory=Traffic, init=False)
    _group: Any = field(default=None, init=False)

    def connect(self, group: Any) -> None:
        """Take the process group of these ranks (a `torch.distributed.ProcessGroup`), in the order of their places."""
        self._group = group

    def calls(self) -> Mapping[str, Callable[..., torch.Tensor]]:
        """Return what stands for each collective op."""
        calls: dict[str, Callable[..., torch.Tensor]] = {
            "all_reduce": self.reduce,
            "look_up": self.look_up,
            "rms_norm_over_ranks": self.rms_norm,
        }
        if self.sequence:
            calls |= {
                "gather_tokens": self.gather_tokens,
                "gather_rows": self.gather_rows,
                "own_tokens": self.own_tokens,
            }
        return calls

    # --- the ops ----------------------------------------------------------------------------------------------------

    def reduce(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, (T, E), or its part of this rank's tokens, (m, E)."""
        return self._reduce_scatter(x_TE) if self.sequence else self._all_reduce("all_reduce", x_TE)

    def look_up(self, ids_T: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of ids, of which each rank has those of its part of the vocabulary."""
        local_T = ids_T - self.first_id
        elsewhere_T = (local_T < 0) | (local_T >= self.num_rows)
        hidden_TE = rows(local_T.masked_fill(elsewhere_T, 0))
        return self.reduce(hidden_TE.masked_fill(elsewhere_T.unsqueeze(1), 0))

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """Return `intarsia.ops.rms_norm` over the features of all ranks, which hold equally many."""
        x = x_TE.float()
        mean = self._all_reduce("rms_norm_over_ranks", x.pow(2).mean(-1, keepdim=True)) / self.size
        return (weight_E * (x * torch.rsqrt(mean + eps)).to(weight_E.dtype)).to(x_TE.dtype)

    def own_tokens(self, x_T: torch.Tensor) -> torch.Tensor:
        """Return what is of this rank's tokens, (m, ...)."""
        size = -(-len(x_T) // self.size)
        return _filled(x_T[self.rank * size : (self.rank + 1) * size], size)

    def gather_tokens(self, x_TE: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Lay the ranks' tokens end to end, (num_tokens, E)."""
        gathered = x_TE.new_empty(self.size * len(x_TE), *x_TE.shape[1:])
        self.traffic.count("gather_tokens", gathered)
        self._group.allgather([list(torch.split(gathered, len(x_TE)))], [x_TE.contiguous()]).wait()
        return gathered[:num_tokens]

    def gather_rows(self, x_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return the activations of some tokens on every rank: one has a row, the others add zeros."""
        if not len(rows_L):
            return x_TE[:0]
        local_L = rows_L - self.rank * len(x_TE)
        elsewhere_L = (local_L < 0) | (local_L >= len(x_TE))
        rows = x_TE[local_L.masked_fill(elsewhere_L, 0)].masked_fill(elsewhere_L.unsqueeze(1), 0)
        return self._all_reduce("gather_rows", rows)

    # --- logits -----------------------------------------------------------------------------------------------------

    def gather_logits(self, logits_LV: torch.Tensor, demand: Demand) -> torch.Tensor | None:
        """Bring the logits of a demand to the first rank.

        Where the likeliest id is all that is needed of a row, each rank sends its own likeliest and no more.

        Args:
            logits_LV: fp32 logits of the ids that are here, padding included.
            demand: which rows they are; the same on every rank.

        Returns:
            (L, V) of the whole vocabulary on the first rank, -inf in the place of what was not needed; else None.
        """
        if self.size == 1:
            return logits_LV
        plain = [row for row, is_plain in enumerate(demand.plain_L) if is_plain]
        others = [row for row, is_plain in enumerate(demand.plain_L) if not is_plain]
        found = logits_LV.new_full((len(demand.rows_L), self.vocab_size), -torch.inf) if self.rank == 0 else None
        if others:
            whole = len(others) == len(logits_LV)
            parts = self._collect("gather_logits", logits_LV if whole else logits_LV[others])
            if found is not None:
                found[others] = torch.cat(parts, dim=1)[:, : self.vocab_size]
        if plain:
            pairs = self._collect("gather_likeliest", self._likeliest(logits_LV[plain]))
            if found is not None:
                best, ids = _best(torch.stack(pairs))
                found[plain, ids.clamp_max(self.vocab_size - 1)] = best
        return found

    def _likeliest(self, logits_LV: torch.Tensor) -> torch.Tensor:
        """Return (logit, id) of each row's highest logit among the ids here that have a token, (L, 2)."""
        count = min(max(0, self.num_ids - self.first_id), self.num_rows)
        if not count:
            return logits_LV.new_tensor([-torch.inf, 0], dtype=_PAIR).expand(len(logits_LV), 2)
        found = logits_LV[:, :count].max(dim=-1)
        return torch.stack((found.values.to(_PAIR), (found.indices + self.first_id).to(_PAIR)), dim=-1)

    def _collect(self, op: str, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the ranks' parts, in their order, on the first rank; nothing on the others."""
        part = part.contiguous()
        if self.rank:
            self.traffic.count(op, part)
            self._group.send([part], 0, 0).wait()
            return []
        parts = [part]
        for peer in range(1, self.size):
            parts.append(torch.empty_like(part))
            self._group.recv([parts[-1]], peer, 0).wait()
        return parts

    # --- between ranks ----------------------------------------------------------------------------------------------

    def _all_reduce(self, op: str, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self.traffic.count(op, x)
        self._group.allreduce([x]).wait()
        return x

    def _reduce_scatter(self, x_TE: torch.Tensor) -> torch.Tensor:
        size = -(-len(x_TE) // self.size)
        x_TE = _filled(x_TE, self.size * size).contiguous()
        self.traffic.count("reduce_scatter", x_TE)
        own = torch.empty_like(x_TE[:size])
        if x_TE.device.type != "cpu":
            self._group.reduce_scatter([own], [list(torch.split(x_TE, size))]).wait()
            return own
        # gloo has none. Each sends every other its tokens, and adds up what it is sent: the same bytes.
        parts = torch.empty_like(x_TE)
        self._group.alltoall_base(parts, x_TE, [], []).wait()
        return torch.sum(parts.view(self.size, size, *x_TE.shape[1:]), dim=0, out=own)


def _filled(x_T: torch.Tensor, size: int) -> torch.Tensor:
    """Return x with zeros behind it, to a size along its first axis."""
    missing = size - len(x_T)
    return torch.cat((x_T, x_T.new_zeros(missing, *x_T.shape[1:]))) if missing else x_T


def _best(pairs_nL2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's highest logit (L,), NaN where one is, and its id (L,): of equal ones the lowest."""
    # Ranks hold rising ids, and of equal numbers the first is found.
    best = pairs_nL2[:, :, 0].max(dim=0)
    ids = pairs_nL2[:, :, 1].gather(0, best.indices.unsqueeze(0)).squeeze(0)
    return best.values.float(), ids.long()
