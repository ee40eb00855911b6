"""The backend `flash` on a GPU, under the contract of attention backends."""

from typing import ClassVar

import pytest

from gpu.parts import DEVICE
from intarsia.plugins import Registry
from intarsia.testing.attention_backends import AttentionContract

pytestmark = pytest.mark.gpu


class TestFlash(AttentionContract):
    device = DEVICE
    heads: ClassVar = ((8, 2), (4, 4), (6, 1), (9, 3))
    head_dims: ClassVar = (32, 64, 80, 128, 256)
    page_sizes: ClassVar = (1, 8, 16, 32, 64, 128)
    #: prompts, chunks of them, decode, verification; page edges; a long one that is split
    rows: ClassVar = ((0, 37), (0, 1), (15, 1), (16, 1), (17, 4), (31, 33), (2047, 1), (1000, 130), (0, 16))
    long = 3000

    def provider(self):
        return Registry.discover().find("attention", "flash").provider
