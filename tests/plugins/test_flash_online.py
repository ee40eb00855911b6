import pytest
import torch

from attending import Sequence, attend, attention_spec, check
from intarsia_flash.online import OnlineAttention

ROWS = ((0, 1), (0, 37), (130, 1), (200, 5), (15, 17))


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("page_size", [8, 16, 128])
@pytest.mark.parametrize("facts", [{}, {"window": 20}, {"soft_cap": 5.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_equal_float64_over_poisoned_slots(order, page_size, facts, dtype):
    spec = attention_spec(6, 2, 40, **facts)
    rows = [Sequence.random(spec, *row, seed, dtype) for seed, row in enumerate(ROWS)]
    check(attend(OnlineAttention(), spec, rows, order=order, page_size=page_size, scatter=3), rows, spec)


def test_a_row_alone_has_the_bits_that_it_has_in_a_batch():
    spec = attention_spec(4, 2, 32)
    rows = [Sequence.random(spec, *row, seed) for seed, row in enumerate(ROWS)]
    together = attend(OnlineAttention(), spec, rows)
    assert all(
        torch.equal(attend(OnlineAttention(), spec, [row])[0], out) for row, out in zip(rows, together, strict=True)
    )
