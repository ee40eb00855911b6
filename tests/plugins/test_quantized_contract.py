"""Quantized folders under the contract of loaders."""

from intarsia_quantized.contract import PackedContract


class TestPacked(PackedContract):
    pass
