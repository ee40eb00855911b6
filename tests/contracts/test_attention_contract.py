"""What the contract of attention backends rests on: its oracle, and what it makes of parts that refuse."""

import pytest
import torch
from attrs import evolve

from contracts.attention_faults import EAGER, FixedOracle, contract
from contracts.planted import failure
from intarsia.defaults.attention import visible
from intarsia.testing.attention_backends import AttentionContract
from intarsia.testing.attention_rows import AttentionRow, attention_of, check_row, exact_attention
from intarsia.types import Unfit


@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_the_oracle_equals_torch_in_float64(heads, window):
    spec = attention_of(*heads, 8, window=window, scale=0.7)
    row = AttentionRow.random(spec, 9, 5, 0, torch.float64)
    q, k, v = (x.transpose(0, 1) for x in (row.queries, row.keys, row.values))
    mask = visible(5, 14, 9, window, q.device)
    how = {"attn_mask": mask, "scale": 0.7, "enable_gqa": True}
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, **how).transpose(0, 1)
    out, size = exact_attention(row, spec)
    assert (torch.from_numpy(out.copy()) - right).abs().max() < 1e-13
    assert (size >= abs(out)).all()


def test_the_oracle_bends_scores_before_it_hides_any():
    spec = attention_of(1, 1, 1, scale=1.0, soft_cap=2.0)
    row = AttentionRow(0, torch.ones(2, 1, 1), torch.tensor([1.0, 3.0]).view(2, 1, 1), torch.eye(2)[:, None, :1])
    out, _ = exact_attention(row, spec)
    scores = 2 * torch.tanh(torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert out[:, 0, 0] == pytest.approx([1.0, float(scores.softmax(0)[0])], abs=1e-12)


@pytest.mark.parametrize(
    ("dtype", "near", "far"), [("float32", 2e-6, 2e-5), ("float16", 5e-4, 1e-2), ("bfloat16", 4e-3, 5e-2)]
)
def test_a_result_may_be_off_by_roundings_and_no_more(dtype, near, far):
    spec = attention_of(2, 1, 8)
    row = AttentionRow.random(spec, 9, 5, 0, getattr(torch, dtype))
    right = torch.from_numpy(exact_attention(row, spec)[0].copy())
    check_row((right * (1 + near)).to(row.queries.dtype), row, spec)
    with pytest.raises(AssertionError, match=r"position 13 is off by .* in head 1: .* is right"):
        wrong = right.clone()
        wrong[4, 1, 3] += far * (1 + abs(wrong[4, 1, 3]))
        check_row(wrong.to(row.queries.dtype), row, spec)


def test_fixed_metadata_that_takes_all_numbers_keeps_the_claim():
    assert failure(contract(FixedOracle), "test_fixed_metadata_serves_later_steps") is None


class Refusing(AttentionContract):
    def provider(self):
        return evolve(EAGER, fit=lambda context: Unfit("it is Sunday"))


@pytest.mark.parametrize("claim", ["test_rows_of_every_kind_equal_float64", "test_its_chunks_show_in_no_bit"])
def test_what_a_backend_refuses_is_not_claimed_and_the_reason_is_shown(claim):
    with pytest.raises(pytest.skip.Exception, match="it is Sunday"):
        getattr(Refusing(), claim)()


class Other(AttentionContract):
    def provider(self):
        return evolve(EAGER, build=lambda context: evolve(EAGER.build(context), formats=("fp8",)))


def test_entries_that_the_suite_cannot_write_are_named():
    with pytest.raises(AssertionError, match=r"reads entries in \('fp8',\); the suite writes float32"):
        Other().test_padding_changes_no_row()
