"""What a rank has been told, as one number: ranks that were told the same have the same."""

from __future__ import annotations

import hashlib
from typing import Final

import msgpack  # type: ignore[import-untyped]
from attrs import define, field

from intarsia.types import BatchPlan, SequenceId

_BYTES: Final = 16


@define
class Ledger:
    """All plans so far, and each running sequence's length and page tables as its last row had them."""

    _chain: bytes = field(default=b"", init=False)
    _tables: dict[SequenceId, tuple[int, tuple[tuple[int, ...], ...]]] = field(factory=dict, init=False)

    def note(self, data: bytes, plan: BatchPlan) -> None:
        """Take a plan, as it came and as it was read."""
        self._chain = hashlib.blake2b(self._chain + data, digest_size=_BYTES).digest()
        for sequence_id in (*plan.left, *plan.preempted):
            self._tables.pop(sequence_id, None)
        for row in plan.rows:
            self._tables[row.sequence_id] = row.start + len(row.token_ids), row.pages

    def checksum(self) -> bytes:
        """Return a BLAKE2b digest of all that (Aumasson et al. 2013)."""
        tables = sorted(self._tables.items())
        packed = msgpack.packb([self._chain, tables], unicode_errors="surrogatepass")
        return hashlib.blake2b(packed, digest_size=_BYTES).digest()
