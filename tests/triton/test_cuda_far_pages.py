"""Pages and rows that lie more than 2**31 numbers apart: of the kernels `cuda` and `flash`, in Triton's interpreter.

The cache `vmm` has addresses for far more pages than there is memory. Here, too, what lies between is never touched, so
that it takes addresses and no memory.

Shape legend: T tokens, H heads, K kv heads, D head dim, P pages, S slots a page.
"""

import types

import pytest
import torch

from attending import attention_spec
from intarsia.ops import OPS
from intarsia.types import CacheGroup, CacheLayout, ForwardBatch
from intarsia_cuda import activations, attention_inputs, norms, sampling
from intarsia_cuda.quantized import matmuls
from intarsia_cuda.quantized.packing import pack
from intarsia_flash.attention import FlashAttention
from integer_weights import integer_weight
from interpreting import placeless_products, true_bf16  # noqa: F401

pytestmark = pytest.mark.usefixtures("true_bf16")
#: Numbers from one page or row to the next; the last of three begins where int32 ends.
APART = 1 << 30
ORDERS = {"PSKD": (4, 2, 16), "PKSD": (2, 4, 16)}


def normal(seed, *shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def apart(near):
    """The same numbers, each entry of the first axis APART numbers from the next."""
    stride = (APART, *near.stride()[1:])
    far = torch.empty((len(near) - 1) * APART + near[0].numel(), dtype=near.dtype).as_strided(near.shape, stride)
    return far.copy_(near)


def cache_of(order, *, far, int8=False):
    """Three pages of four tokens, full of ones."""
    shape = (3, *ORDERS[order])
    tensors = [torch.ones(shape, dtype=torch.int8 if int8 else torch.bfloat16) for _ in range(2)]
    scales = [torch.ones(shape[:-1]) for _ in range(2)] if int8 else [None, None]
    tensors = [apart(tensor) for tensor in tensors] if far else tensors
    scales = [apart(scale) if far and int8 else scale for scale in scales]
    return types.SimpleNamespace(keys=tensors[0], values=tensors[1], key_scales=scales[0], value_scales=scales[1])


# --- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("int8", [False, True])
def test_keys_and_values_are_written_to_pages_beyond_int32(order, int8):
    qkv, slots = normal(1, 3, 4 + 2 * 2, 16), torch.tensor([11, 8, 2])
    angles = normal(2, 3, 1, 8).cos(), normal(2, 3, 1, 8).sin()
    caches = [cache_of(order, far=far, int8=int8) for far in (False, True)]
    outs = [attention_inputs.attention_inputs(qkv, 4, None, 1e-5, angles, cache, slots, order) for cache in caches]
    assert torch.equal(*outs)
    for key in ("keys", "values", "key_scales", "value_scales"):
        near, far = (getattr(cache, key) for cache in caches)
        assert (near is None and far is None) or (torch.equal(near, far) and not (near[2] == 1).all())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("start", [11, 0])
def test_attention_reads_pages_beyond_int32(order, int8, start):
    """One row that decodes over three pages, or as many tokens as a prompt of its own."""
    spec, count = attention_spec(4, 2, 16), 12 - start
    layout = CacheLayout(
        order=order, page_size=4, format="int8" if int8 else "bfloat16", entry_bytes=1 if int8 else 2,
        scale_bytes=4 if int8 else 0,
        groups=(CacheGroup(kind="full", layers=(0,), num_kv_heads=2, head_dim=16),),
    )  # fmt: skip
    keys, values, queries = normal(1, 12, 2, 16), normal(2, 12, 2, 16), normal(3, count, 4, 16)
    outs = []
    for far in (False, True):
        cache = cache_of(order, far=far, int8=int8)
        OPS["cache_write"].call(keys, values, cache, torch.arange(12), order)
        batch = ForwardBatch(
            ids_T=torch.zeros(count, dtype=torch.int64), positions_T=torch.arange(start, 12),
            slots_T=(torch.arange(start, 12),), bounds=(0, count), starts=(start,), pages=(((0, 1, 2),),),
            logits_L=torch.zeros(0, dtype=torch.int64),
        )  # fmt: skip
        part = FlashAttention("bfloat16", (spec,))
        batch = types.SimpleNamespace(attention=part.prepare(batch, layout))
        outs.append(part.attend(queries, cache, spec, 0, batch))
    assert outs[0].isfinite().all() and torch.equal(*outs)


# --- rows -------------------------------------------------------------------------------------------------------------

OPS_ON_ROWS = {
    "rms_norm": lambda x: norms.rms_norm(x, normal(2, 32), 1e-5),
    "add_rms_norm": lambda x: torch.cat(norms.add_rms_norm(x, x, normal(2, 32), 1e-5), 1),
    "rms_norm_int8": lambda x: norms.rms_norm_int8(x, normal(2, 32), 1e-5, None, x)[0],
    "layer_norm": lambda x: norms.layer_norm(x, normal(2, 32), None, 1e-5),
    "silu_mul": activations.silu_mul,
    "rope": lambda x: attention_inputs.rope(x.unflatten(1, (2, 16)), normal(2, 3, 1, 8), normal(3, 3, 1, 8)),
    "quantize": lambda x: matmuls.quantize_rows(x)[0],
    "sample_rows": lambda x: sampling.sample_rows(
        x,
        torch.ones(3).double(),
        torch.zeros(3, dtype=torch.int32),
        *[torch.full((3,), p).double() for p in (0.9, 0.1, 0.5)],
    ),
}


@pytest.mark.parametrize("op", OPS_ON_ROWS)
def test_rows_beyond_int32_are_read_as_near_ones(op):
    x = normal(1, 3, 32, dtype=torch.float32 if op == "sample_rows" else torch.bfloat16)
    assert torch.equal(OPS_ON_ROWS[op](apart(x)), OPS_ON_ROWS[op](x))


def test_int8_rows_beyond_int32_are_multiplied_as_near_ones():
    weight, scales = pack(integer_weight("int8", 20, 32)), torch.ones(3)
    numbers = torch.randint(-127, 128, (3, 32), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    assert torch.equal(
        matmuls.linear_int8(apart(numbers), scales, weight), matmuls.linear_int8(numbers, scales, weight)
    )
