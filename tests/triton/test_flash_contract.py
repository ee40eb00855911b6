"""The kernels of `flash` under the contract of attention backends, in Triton's interpreter."""

from typing import ClassVar

import pytest
from attrs import evolve

from intarsia.testing.attention_backends import AttentionContract
from intarsia.types import Fit, Unfit
from intarsia_flash import provide_attention_backends
from intarsia_flash.attention import FlashAttention
from interpreting import placeless_products, true_bf16  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("true_bf16", "placeless_products"), pytest.mark.timeout(1800)]


def fit(context):
    """Say of heads what the plugin says on GPUs."""
    wide = [layer.attention.head_dim for layer in context.spec.layers]
    return Unfit("heads") if any(each % 8 or each > 256 for each in wide) else Fit(90)


def build(context):
    """Build what the plugin builds on GPUs."""
    layers = tuple(dict.fromkeys(layer.attention for layer in context.spec.layers))
    return FlashAttention(context.engine.dtype, layers, splits=context.engine.invariance != "bitwise")


class TestInterpreted(AttentionContract):
    heads: ClassVar = ((3, 1),)
    head_dims: ClassVar = (40,)
    dtypes: ClassVar = ("bfloat16",)
    page_sizes: ClassVar = (8, 100)
    rows: ClassVar = ((0, 19), (130, 1), (260, 2), (40, 5))
    chunks: ClassVar = (37, 64)
    long: ClassVar = 600
    examples = 4

    def provider(self):
        (provider,) = provide_attention_backends()
        return evolve(provider, fit=fit, build=build)
