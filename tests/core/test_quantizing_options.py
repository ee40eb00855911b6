"""Which weights quantizers take: the options that all of them share."""

import subprocess
import sys

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from intarsia.config import structure
from intarsia.errors import ConfigError
from intarsia.quantizing.options import QuantizerOptions

LAYERS = {f"layers.{i}.{part}.weight" for i in (0, 1, 10) for part in ("qkv", "out", "gate_up", "down")}
EXPERTS = {"layers.1.experts.0.gate_up.weight", "layers.1.experts.12.down.weight"}
ROUTER, POSITIONS, EMBED, HEAD = "layers.1.router.weight", "positions.weight", "embed.weight", "head.weight"
ALL = LAYERS | EXPERTS | {ROUTER, POSITIONS, EMBED, HEAD}


def taken(**options):
    chosen = QuantizerOptions(**options)
    return {name for name in ALL if chosen.takes(name)}


def test_by_default_every_matrix_of_layers_and_the_head_are_taken():
    assert taken() == LAYERS | EXPERTS | {HEAD}


def test_head_and_embedding_follow_their_own_options():
    assert taken(head=False) == LAYERS | EXPERTS
    assert taken(embed=True) == LAYERS | EXPERTS | {HEAD, EMBED}
    assert taken(head=False, embed=True) == LAYERS | EXPERTS | {EMBED}


def test_a_pattern_does_not_take_what_its_option_leaves():
    assert taken(include=("embed.*", "head.*"), head=False) == set()
    assert taken(include=("embed.*", "head.*"), embed=True) == {EMBED, HEAD}


@given(st.lists(st.sampled_from(["*", "*.weight", "positions.*", "layers.*.router.*", ROUTER]), min_size=1))
def test_routers_and_positions_are_never_taken(include):
    assert not {ROUTER, POSITIONS} & taken(include=tuple(include), embed=True)


def test_patterns_name_layers_and_parts_exactly():
    assert taken(include=("layers.1.*",)) == {n for n in LAYERS | EXPERTS if n.startswith("layers.1.")}
    assert taken(include=("*.down.weight",)) == {n for n in LAYERS | EXPERTS if n.endswith(".down.weight")}
    assert taken(exclude=("layers.0.*", HEAD)) == {n for n in LAYERS | EXPERTS if not n.startswith("layers.0.")}
    assert taken(include=("LAYERS.*",)) == set()


def test_exclude_beats_include():
    assert taken(include=("layers.1.*",), exclude=("*.down.weight",)) == {
        n for n in LAYERS | EXPERTS if n.startswith("layers.1.") and not n.endswith(".down.weight")
    }
    assert taken(exclude=("*",)) == set()


@frozen(kw_only=True)
class Derived(QuantizerOptions):
    head: bool = False
    bits: int = 3


def test_a_quantizers_own_options_inherit_these_and_are_read_from_a_config():
    options = structure(Derived, {"include": ["layers.1.*"], "exclude": ["*.down.weight"]}, "quantizer")
    assert options == Derived(include=("layers.1.*",), exclude=("*.down.weight",), head=False)
    assert not options.takes(HEAD) and options.takes("layers.1.qkv.weight")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"include": "layers.*"}, "include"),
        ({"exclude": [1]}, "exclude"),
        ({"head": "yes"}, "head"),
        ({"hed": 1}, "hed"),
    ],
)
def test_options_of_a_wrong_type_or_name_are_refused_by_their_path(wrong, field):
    with pytest.raises(ConfigError, match=rf"quantizer\.{field}"):
        structure(Derived, wrong, "quantizer")


def test_options_need_no_torch():
    code = "import sys, intarsia.quantizing.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
