"""How launches are told from forms that are listed: on a GPU, by what Triton's hook says."""

from attrs import evolve

import ahead_of_time_forms
from gpu.launched import launched, listed

#: What the hook is told of a launch of the plain form, in Triton 3.6 and 3.9: constants and attributes by place.
TOLD = {
    "signature": {"x": "*bf16", "out": "*fp32", "factor": "fp32", "width": "i32", "BLOCK": "constexpr"},
    "constants": {(4,): 256},
    "configs": [{(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]], (3,): []}],
    "num_warps": 4,
    "num_stages": 2,
}
NAMES = ["x", "out", "factor", "width", "BLOCK"]


def seen(**changes):
    return launched("ahead_of_time_forms", "scale", NAMES, TOLD | changes)


def test_a_launch_of_a_listed_form_is_that_form():
    assert seen() == listed(ahead_of_time_forms.plain())


def test_a_launch_with_other_constants_types_or_warps_is_not():
    known = listed(ahead_of_time_forms.plain())
    assert seen(constants={(4,): 128}) != known
    assert seen(num_warps=8) != known
    assert seen(signature=TOLD["signature"] | {"x": "*fp16"}) != known
    # A whole number that is 1 becomes a constant, where a kernel does not say otherwise.
    assert seen(constants={(4,): 256, (3,): 1}) != known


def test_other_alignment_alone_is_told_apart():
    found = seen(configs=[{(0,): [["tt.divisibility", 16]]}])
    known = listed(ahead_of_time_forms.plain())
    assert found != known and evolve(found, aligned=known.aligned) == known
