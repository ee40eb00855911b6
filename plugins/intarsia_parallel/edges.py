"""Hidden states from one pipeline stage to the next, sent and received beside the computing.

Shape legend: T tokens of a microbatch, or this rank's share of them where they are sharded; E embed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from attrs import define, field

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

#: What hidden states can be: a runner's residual stream may be wider than the engine's dtype.
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
#: Messages are numbered, so that several can be under way; gloo's tags have 31 bits.
_TAGS: Final = 1 << 20
#: Of the two ranks of an edge.
_SENDER, _RECEIVER = 0, 1


@define(eq=False)
class Outbound:
    """The end that sends.

    Attributes:
        group: of the two ranks.
        device: of the tensors.
    """

    group: ProcessGroup
    device: torch.device
    _open: deque[tuple[Work, torch.Tensor]] = field(factory=deque, init=False)
    _number: int = field(default=0, init=False)
    #: bytes of hidden states so far
    num_bytes: int = field(default=0, init=False)

    def send(self, hidden_TE: torch.Tensor) -> None:
        """Begin to send; the tensor must not change any more."""
        hidden_TE = hidden_TE.contiguous()
        if not self._number:
            facts = [_DTYPES.index(hidden_TE.dtype), hidden_TE.shape[1]]
            self._post(torch.tensor(facts, dtype=torch.int64, device=self.device))
        self._post(hidden_TE)
        self.num_bytes += hidden_TE.numel() * hidden_TE.element_size()
        while self._open and self._open[0][0].is_completed():
            self._open.popleft()[0].wait()

    def settle(self) -> None:
        """Wait until all has been sent."""
        while self._open:
            self._open.popleft()[0].wait()

    def _post(self, tensor: torch.Tensor) -> None:
        # The tensor is kept until it has been sent.
        self._open.append((self.group.send([tensor], _RECEIVER, self._number % _TAGS), tensor))
        self._number += 1


@define(eq=False)
class Inbound:
    """The end that receives, into two buffers by turns: what one step has received lasts until the step after the next.

    Attributes:
        group: of the two ranks.
        device: of the tensors.
    """

    group: ProcessGroup
    device: torch.device
    _dtype: torch.dtype | None = field(default=None, init=False)
    _width: int = field(default=0, init=False)
    _buffers: list[torch.Tensor] = field(factory=list, init=False)
    _coming: deque[tuple[Work, torch.Tensor]] = field(factory=deque, init=False)
    _number: int = field(default=0, init=False)

    def expect(self, sizes: Sequence[int]) -> None:
        """Begin to receive a step's hidden states.

        Args:
            sizes: T of each microbatch.
        """
        assert not self._coming, "one step at a time"
        if self._dtype is None:
            self._learn()
        buffer, start = self._buffer(sum(sizes)), 0
        for size in sizes:
            self._post(buffer[start : start + size])
            start += size

    def take(self) -> torch.Tensor:
        """Wait for the next microbatch's hidden states (T, E)."""
        work, hidden_TE = self._coming.popleft()
        work.wait()
        return hidden_TE

    def _learn(self) -> None:
        """Receive what the sender says of all that follows."""
        facts = torch.empty(2, dtype=torch.int64, device=self.device)
        self._post(facts)
        index, self._width = self.take().tolist()
        self._dtype = _DTYPES[index]

    def _buffer(self, num_rows: int) -> torch.Tensor:
        if len(self._buffers) < 2:
            self._buffers.append(torch.empty(0, self._width, dtype=self._dtype, device=self.device))
        buffer = self._buffers.pop(0)
        if len(buffer) < num_rows:
            buffer = torch.empty(num_rows, self._width, dtype=self._dtype, device=self.device)
        self._buffers.append(buffer)
        return buffer

    def _post(self, tensor: torch.Tensor) -> None:
        self._coming.append((self.group.recv([tensor], _SENDER, self._number % _TAGS), tensor))
        self._number += 1
