"""The backend `flash` on a GPU against float64: what the interpreter's tests hold, on the device."""

import pytest
import torch

from attending import AttentionRow, as_int8, attend, attention_spec, check
from gpu.parts import DEVICE, build

pytestmark = pytest.mark.gpu

DTYPES = ("float32", "float16", "bfloat16")
#: (start, length) of rows: prompts, chunks of them, decode, verification; page edges; a long one that is split.
ROWS = [(0, 37), (0, 1), (15, 1), (16, 1), (17, 4), (31, 33), (2047, 1), (1000, 130), (0, 16)]


def rows(spec, dtype, pairs=ROWS):
    return [AttentionRow.random(spec, *pair, seed=i, dtype=getattr(torch, dtype)) for i, pair in enumerate(pairs)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 4, 64), (6, 1, 80), (16, 2, 256), (9, 3, 32)])
def test_rows_of_all_kinds_in_one_batch_equal_float64(dtype, heads):
    spec = attention_spec(*heads)
    sequences = rows(spec, dtype)
    part = build("attention", "flash", spec, dtype)
    for order in part.orders:
        check(attend(part, spec, sequences, order=order, scatter=1, device=DEVICE), sequences, spec)


@pytest.mark.parametrize("facts", [{"window": 24}, {"soft_cap": 2.0}, {"window": 100, "soft_cap": 30.0}])
def test_windows_and_caps_equal_float64(facts):
    spec = attention_spec(8, 2, 64, **facts)
    sequences = rows(spec, "float32")
    part = build("attention", "flash", spec, "float32")
    check(attend(part, spec, sequences, order=part.orders[0], scatter=2, device=DEVICE), sequences, spec)


@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_every_page_size_equals_float64(page_size):
    spec = attention_spec(8, 2, 128)
    sequences = rows(spec, "bfloat16")
    part = build("attention", "flash", spec, "bfloat16")
    outs = attend(part, spec, sequences, order=part.orders[0], page_size=page_size, scatter=3, device=DEVICE)
    check(outs, sequences, spec)


def test_int8_entries_equal_float64_over_what_they_stand_for():
    spec = attention_spec(8, 2, 128)
    part = build("attention", "flash", spec, "bfloat16")
    if "int8" not in part.formats:
        pytest.skip("flash does not read int8 entries")
    sequences = rows(spec, "bfloat16")
    outs = attend(part, spec, sequences, order=part.orders[0], scatter=4, cache_dtype=torch.int8, device=DEVICE)
    check(outs, [as_int8(sequence) for sequence in sequences], spec)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    spec = attention_spec(8, 2, 128)
    sequences = rows(spec, dtype)
    part = build("attention", "flash", spec, dtype)
    if part.invariance(dtype) != "bitwise":
        pytest.skip(f"flash promises {part.invariance(dtype)} in {dtype}")
    order = part.orders[0]
    together = attend(part, spec, sequences, order=order, scatter=5, device=DEVICE)
    for sequence, out in zip(sequences, together, strict=True):
        (alone,) = attend(part, spec, [sequence], order=order, device=DEVICE)
        assert torch.equal(alone, out)
