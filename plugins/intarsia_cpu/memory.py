"""Memory of the host for what every step reads whole: weights.

A machine looks an address up by its page. Of 4 KiB pages a step over a small model's weights takes some fifty thousand,
more than the machine keeps in mind; of 2 MiB pages, a hundred. Linux gives huge pages to those who ask. Caches do not:
the first write to each takes a millisecond, and comes in the middle of a step.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Final

import torch

#: Bytes of a huge page. On machines with others the same memory is given, on whatever pages there are.
HUGE_PAGE: Final = 2 << 20


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the host, as `torch.empty` does: nothing is written to it.

    One that fills half a huge page begins at one, and lies on huge pages where the system has them: what it takes is
    rounded up to them.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or 2 * num_bytes < HUGE_PAGE:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # this kernel has none, or may not be asked
        memory.madvise(advice)
    octets = torch.frombuffer(memory, dtype=torch.uint8)  # holds the mapping
    begin = -octets.data_ptr() % HUGE_PAGE
    return octets[begin : begin + num_bytes].view(dtype).view(tuple(shape))
