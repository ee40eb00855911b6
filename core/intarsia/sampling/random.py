"""Counter-based random numbers: a draw is a function of what it is for, and of nothing that ran before.

Shape legend: L numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

#: What a uniform number is drawn for: the third word of its counter. A token of the target's own; whether a draft is
#: accepted; a token in place of a rejected one; a draft.
CHOOSE: Final = 0
ACCEPT: Final = 1
REPLACE: Final = 2
DRAFT: Final = 3

_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL: Final = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_MASK: Final = np.uint64(0xFFFFFFFF)
_SHIFT: Final = np.uint64(32)


def philox(keys_L2: np.ndarray, counters_L4: np.ndarray) -> np.ndarray:
    """Return Philox4x32-10 blocks (L, 4): 32-bit words, held in uint64 (Salmon et al. 2011)."""
    k0, k1 = keys_L2[:, 0].copy(), keys_L2[:, 1].copy()
    c0, c1, c2, c3 = (counters_L4[:, i].copy() for i in range(4))
    for _ in range(10):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (second >> _SHIFT) ^ c1 ^ k0, (first >> _SHIFT) ^ c3 ^ k1
        c1, c3 = second & _MASK, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack((c0, c1, c2, c3), axis=1)


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], purpose: int) -> np.ndarray:
    """Return numbers in [0, 1), float64 with 53 random bits, one for each (seed, choice, position)."""
    seed = np.asarray(seeds, dtype=np.uint64)
    keys = np.stack((seed & _MASK, seed >> _SHIFT), axis=1)
    counters = np.zeros((len(seed), 4), dtype=np.uint64)
    counters[:, 0], counters[:, 1], counters[:, 2] = positions, choices, purpose
    words = philox(keys, counters)
    bits = (words[:, 0] << np.uint64(21)) | (words[:, 1] >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53
