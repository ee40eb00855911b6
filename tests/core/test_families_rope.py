"""Rotary embeddings as configs spell them, against what transformers makes of the same config (R01, R02)."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from engines import engine_of
from intarsia.errors import CheckpointError
from intarsia.families import MAX_LEN, Fields, max_len, read_rope
from intarsia.rope import cos_sin, inverse_frequencies
from intarsia.testing import prompt_logits
from models import edit_json, tiny_llama
from ropes import reference_rope

CONFIG = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
}
HEAD_DIM = 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN = {"factor": 16.0, "original_max_position_embeddings": 1024}
ORIGINAL = "original_max_position_embeddings"


def factors(dim):
    return {"short_factor": [1 + 0.1 * i for i in range(dim // 2)], "long_factor": [2.0 + i for i in range(dim // 2)]}


def fields_of(**changes):
    """Return the config of a llama with these changes; `...` removes a field."""
    return Fields({key: value for key, value in (CONFIG | changes).items() if value is not ...})


def theirs(path, model_type, changes):
    """Return what transformers makes of a config file."""
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **fields_of(**changes).values}))
    return AutoConfig.from_pretrained(path)


def check(rope, config, layer_type=None, lengths=(100, 1024, 1025, 4096, 5000)):
    for length in lengths:
        expected, attention_factor = reference_rope(config, length, layer_type)
        torch.testing.assert_close(inverse_frequencies(rope, length), expected, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)


def refusal(layer_type=None, partial=None, **changes):
    with pytest.raises(CheckpointError) as caught:
        read_rope(fields_of(**changes), HEAD_DIM, layer_type, partial=partial)
    return str(caught.value)


# --- every spelling ---------------------------------------------------------------------------------------------------

SPELLINGS = [
    {},
    {"rope_theta": 5e5},
    {"rope_theta": 500_000},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 1e6, "rope_parameters": {}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "factor": 8.0}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 4}},
    {"rope_theta": 9.0, "rope_scaling": {"rope_theta": 7.0, "type": "linear", "factor": 2.0}},
    {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}, ORIGINAL: 512},
    {
        "rope_parameters": {
            "rope_theta": 5e5,
            "rope_type": "llama3",
            **{k: v for k, v in LLAMA3.items() if k != ORIGINAL},
        }
    },
    {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0, ORIGINAL: 1024}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", **YARN}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, ORIGINAL: 512},
    {"rope_scaling": {"rope_type": "yarn", **YARN, ORIGINAL: 1024}, ORIGINAL: 512},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "factor": None}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 1, "mscale_all_dim": 1}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.5}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "mscale": 2.0, "mscale_all_dim": 0}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.5, "mscale": 2.0, "mscale_all_dim": 1.0}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "beta_fast": None, "beta_slow": 0}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}},
    {"rope_scaling": {"rope_type": "yarn", **YARN, "finetuned": True, "attn_factor": 3}},
    {"rope_scaling": {"rope_type": "longrope", **factors(16)}, ORIGINAL: 1024},
    {"rope_scaling": {"type": "longrope", **factors(16), ORIGINAL: 1024}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "longrope", **factors(16), ORIGINAL: 1024}},
    {"rope_scaling": {"type": "longrope", **factors(16), "factor": 3.0, ORIGINAL: 1024}},
    {"rope_scaling": {"type": "longrope", **factors(16), "factor": 0.5, ORIGINAL: 1024}},
    {"rope_scaling": {"type": "longrope", **factors(16), "factor": 3.0}},
    {"rope_scaling": {"type": "longrope", **factors(16), "attention_factor": 1.25, ORIGINAL: 1024}},
    {"rope_scaling": {"type": "longrope", **factors(16), ORIGINAL: 4096}},
]


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_every_spelling_gives_what_transformers_gives(tmp_path, spelling):
    check(read_rope(fields_of(**spelling), HEAD_DIM), theirs(tmp_path, "llama", spelling))


@pytest.mark.parametrize("spelling", SPELLINGS, ids=str)
def test_what_transformers_saves_means_the_same(tmp_path, spelling):
    config = theirs(tmp_path, "llama", spelling)
    config.save_pretrained(tmp_path)
    saved = Fields(json.loads((tmp_path / "config.json").read_text()))
    assert "rope_parameters" in saved.values
    check(read_rope(saved, HEAD_DIM), config)


def test_su_is_the_old_name_of_longrope(tmp_path):
    spelling = {"rope_scaling": {"type": "su", **factors(16)}, ORIGINAL: 1024}
    rope = read_rope(fields_of(**spelling), HEAD_DIM, partial=1.0)
    assert rope.kind == "longrope"
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(1024)))
    # transformers 5 reads the old name only with the original length in the table.
    spelling["rope_scaling"][ORIGINAL] = 1024
    check(rope, theirs(tmp_path, "phi3", spelling))


def test_a_default_theta_is_taken_only_where_none_is_given():
    assert read_rope(fields_of(), 16, default_theta=1e6).base == 1e6
    assert read_rope(fields_of(rope_theta=5e5), 16, default_theta=1e6).base == 5e5
    assert read_rope(fields_of(rope_parameters={"rope_theta": 5e5}), 16, default_theta=1e6).base == 5e5
    assert read_rope(fields_of(rope_theta=5e5, rope_parameters={"rope_theta": None}), 16).base == 5e5


def test_a_theta_is_never_lost_to_the_default():
    message = refusal(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5e5})
    assert "rope_theta 500000.0 would be lost" in message


# --- R01, R02 ---------------------------------------------------------------------------------------------------------


def test_a_base_inside_rope_parameters_is_used():
    inside = read_rope(fields_of(rope_parameters={"rope_theta": 500_000, "rope_type": "default"}), 16)
    outside = read_rope(fields_of(rope_theta=500_000, rope_scaling=None), 16)
    assert inside == outside
    assert inverse_frequencies(inside, 100)[1].item() == pytest.approx(500_000 ** (-2 / 16), rel=1e-6)


@pytest.mark.parametrize(
    ("more", "multiplier"),
    [
        ({"rope_type": "yarn"}, 1.2772588722),
        ({"rope_type": "yarn", "mscale": 1, "mscale_all_dim": 1}, 1.0),
        ({"rope_type": "yarn", "attention_factor": 1.0}, 1.0),
        ({"type": "yarn"}, 1.2772588722),
    ],
    ids=str,
)
def test_yarn_multiplies_cosine_and_sine(more, multiplier):
    rope = read_rope(fields_of(rope_scaling={**YARN, **more}), HEAD_DIM)
    assert rope.attention_factor == pytest.approx(multiplier, abs=1e-10)
    cos_LD, sin_LD = cos_sin(rope, 64)
    assert cos_LD[0].tolist() == pytest.approx([multiplier] * 8)
    torch.testing.assert_close(cos_LD**2 + sin_LD**2, torch.full((64, 8), multiplier**2))


# --- parts of heads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["default", "longrope"])
@pytest.mark.parametrize(
    ("spelling", "dim"),
    [
        ({"partial_rotary_factor": 0.5}, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 8),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.25}, 8),
        ({"partial_rotary_factor": 0.4}, 6),
        ({"partial_rotary_factor": None}, 16),
        ({}, 16),
    ],
    ids=str,
)
def test_a_family_can_rotate_a_part_of_each_head_as_phi3(tmp_path, kind, spelling, dim):
    table = {"rope_type": kind, "rope_theta": 1e4, **spelling.get("rope_parameters", {})}
    if kind == "longrope":
        table |= factors(dim)
    spelling = {ORIGINAL: 1024} | spelling | {"rope_parameters": table}
    rope = read_rope(fields_of(**spelling), HEAD_DIM, partial=1.0)
    assert rope.dim == dim
    # transformers cannot read null here.
    check(rope, theirs(tmp_path, "phi3", {k: v for k, v in spelling.items() if v is not None}))


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("spelling", [{}, {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 1}], ids=str)
def test_a_family_has_a_part_of_its_own_as_phi(tmp_path, kind, spelling):
    tables = {"llama3": LLAMA3, "yarn": YARN, "default": {}}
    spelling = {"rope_scaling": {"type": kind, **tables.get(kind, {"factor": 2.0})}, **spelling}
    rope = read_rope(fields_of(**spelling), HEAD_DIM, partial=0.5)
    assert rope.dim == 16 * spelling.get("partial_rotary_factor", 0.5)
    check(rope, theirs(tmp_path, "phi", spelling))


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.05, True, "0.5", float("nan"), float("inf"), 10**400, [0.5]], ids=str)
@pytest.mark.parametrize("partial", [None, 1.0])
def test_a_malformed_part_is_refused_by_its_path(value, partial):
    assert "config: partial_rotary_factor is" in refusal(partial=partial, partial_rotary_factor=value)
    table = {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": value}
    assert "config: rope_scaling.partial_rotary_factor is" in refusal(partial=partial, rope_scaling=table)


# --- per layer type ---------------------------------------------------------------------------------------------------

THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
GEMMA3 = [
    {},
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e5}},
    {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}}},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    },
    {
        "rope_theta": 3e5,
        "rope_local_base_freq": 3e4,
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default"}},
    },
    {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", **YARN},
            "sliding_attention": {"rope_type": "default"},
        }
    },
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "llama3", **LLAMA3},
            "sliding_attention": {"rope_type": "yarn", "factor": 2.0},
        },
        ORIGINAL: 512,
    },
    {"rope_parameters": {"full_attention": {"rope_type": "longrope", **factors(16), ORIGINAL: 1024}}},
]


@pytest.mark.parametrize("spelling", GEMMA3, ids=str)
@pytest.mark.parametrize("layer_type", THETAS)
def test_every_layer_type_gives_what_transformers_gives_for_gemma3(tmp_path, spelling, layer_type):
    spelling = {"head_dim": HEAD_DIM, **spelling}
    config = theirs(tmp_path, "gemma3_text", spelling)
    theta = THETAS[layer_type]
    check(read_rope(fields_of(**spelling), HEAD_DIM, layer_type, default_theta=theta), config, layer_type)
    config.save_pretrained(tmp_path)
    saved = Fields(json.loads((tmp_path / "config.json").read_text()))
    check(read_rope(saved, HEAD_DIM, layer_type, default_theta=theta), config, layer_type)


def test_type_means_rope_type_for_layer_types_too():
    # transformers 4 read it; 5 loses it to a default of its own, and with it the scaling.
    old, new = ({"rope_scaling": {spelling: "linear", "factor": 8.0}} for spelling in ("type", "rope_type"))
    rope = read_rope(fields_of(**old), HEAD_DIM, "full_attention")
    assert rope == read_rope(fields_of(**new), HEAD_DIM, "full_attention")
    assert (rope.kind, rope.factor) == ("linear", 8.0)


def test_a_table_that_would_be_lost_is_refused():
    for layer_type in THETAS:
        assert "rope_parameters.rope_theta is 500000.0" in refusal(layer_type, rope_parameters={"rope_theta": 5e5})
    tables = {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}}
    assert "rope_parameters.full_attention" in refusal(rope_parameters=tables)
    assert "rope_scaling.full_attention" in refusal("full_attention", rope_scaling=tables)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters.full_attention is 3"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, "rope_parameters.full_attention.factor"),
        ({"rope_parameters": {"full_attention": {"factor": 2.0}}}, "rope_parameters.full_attention.factor is 2.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, "rope_parameters.full_attention.rope_theta is 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "rope_scaling.factor is '8'"),
        (
            {"rope_scaling": {"factor": "8"}, "rope_parameters": {"full_attention": {"rope_type": "linear"}}},
            "rope_scaling over rope_parameters.full_attention.factor is '8'",
        ),
        ({"rope_theta": "1e6"}, "config: rope_theta is '1e6'"),
    ],
    ids=str,
)
def test_a_malformed_table_of_a_layer_type_is_refused_by_its_path(changes, named):
    assert named in refusal("full_attention", **changes)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mrope", "proportional", "longrop", "yarm", "", 3, ["llama3"], {"a": 1}])
@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_an_unknown_kind_is_refused_by_name(kind, spelling):
    message = refusal(rope_scaling={spelling: kind, "factor": 2.0})
    assert f"rope_scaling.{spelling} is {kind!r}" in message
    assert "default, linear, dynamic, llama3, yarn, longrope, su" in message
    if kind == "longrop":
        assert "Did you mean 'longrope'?" in message


#: Where transformers takes 0 as not given.
OPTIONAL = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
BAD = [0, -1, True, "4", [4], {}, float("nan"), float("inf"), 10**400, 1e299, 1e-9]
#: kind -> a valid table.
TABLES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN | {"attention_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "longrope": factors(16) | {"factor": 4.0, "attention_factor": 1.0, ORIGINAL: 1024},
}
NUMBERS = [
    (kind, name) for kind, table in TABLES.items() for name, value in table.items() if not isinstance(value, list)
]


@pytest.mark.parametrize("value", BAD, ids=str)
@pytest.mark.parametrize(("kind", "name"), NUMBERS)
def test_a_malformed_number_is_refused_by_its_path(kind, name, value):
    if value == 0 and name in OPTIONAL:
        value = 1e-300  # 0 is not given
    message = refusal(rope_parameters={"rope_type": kind, **TABLES[kind], name: value})
    assert f"config: rope_parameters.{name} is" in message


@pytest.mark.parametrize("value", [0, -1, 0.5, True, "1e6", [4], {}, float("nan"), float("inf"), 10**400], ids=str)
def test_a_malformed_theta_is_refused_by_its_path(value):
    assert "config: rope_theta is" in refusal(rope_theta=value)
    if value != {}:
        assert "config: rope_parameters.rope_theta is" in refusal(rope_parameters={"rope_theta": value})


@pytest.mark.parametrize(
    "value", [[1.0] * 7, [1.0] * 9, [1.0] * 7 + ["2"], [1.0] * 7 + [0], "12345678", 1.0, []], ids=str
)
@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_a_list_of_factors_that_is_not_one_positive_number_a_pair_is_refused(name, value):
    message = refusal(rope_parameters={"rope_type": "longrope", **TABLES["longrope"], name: value})
    assert f"config: rope_parameters.{name} is" in message


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ({"rope_type": "dynamic"}, "rope_parameters.factor is missing"),
        ({"rope_type": "yarn"}, "rope_parameters.factor is None"),
        ({"rope_type": "longrope", **factors(16)}, "rope_parameters.factor is None"),
        (
            {"rope_type": "longrope", ORIGINAL: 1024, "short_factor": [1.0] * 8},
            "rope_parameters.long_factor is missing",
        ),
        ({"rope_type": "longrope", ORIGINAL: 1, **factors(16)}, f"rope_parameters.{ORIGINAL} is 1"),
        ({"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}, "rope_parameters.low_freq_factor"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "rope_parameters.high_freq_factor"),
        ({"rope_type": "yarn", **YARN, "beta_slow": 64}, "beta_fast is None, not from beta_slow (64) up"),
        ({"rope_type": "yarn", **YARN, "truncate": 1}, "rope_parameters.truncate is 1"),
        ({"rope_type": "yarn", **YARN, "rope_theta": 1.0}, "rope_theta above 1"),
        ({"rope_type": "yarn", **YARN, **factors(16)}, "rope_parameters.short_factor"),
        ({"rope_theta": "1e6"}, "rope_parameters.rope_theta"),
        ({"rope_theta": 0.5}, "rope_parameters.rope_theta is 0.5"),
        ({"factor": 4.0}, "rope_parameters.factor"),
        ({"long_factor": [1.0] * 8}, "rope_parameters.long_factor"),
        ({"rope_type": "linear", "factor": 2.0, "full_attention": {}}, "rope_parameters.full_attention"),
        ([1, 2], "rope_parameters is [1, 2]"),
        ("yarn", "rope_parameters is 'yarn'"),
    ],
    ids=str,
)
def test_a_malformed_table_is_refused_by_its_path(table, named):
    assert named in refusal(rope_parameters=table)


def test_dynamic_refuses_a_head_of_one_pair():
    with pytest.raises(CheckpointError, match="more than 2 dimensions"):
        read_rope(fields_of(rope_scaling={"type": "dynamic", "factor": 2.0}), 2)


KNOWN = sorted({name for table in TABLES.values() for name in table} | {"rope_theta", "truncate"})
GOOD = st.sampled_from([0.5, 1, 2, 8.0, 40.0, 1024, 1e6]) | st.booleans() | st.just([1.0, 2.0] * 4)
JUNK = st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.floats(), max_size=9)


@st.composite
def random_configs(draw, values):
    """Tables of the known names, each with some value or left out, and the same beside them."""
    table = {"rope_type": draw(st.sampled_from([*TABLES, "default"]))} if draw(st.integers(0, 9)) else {}
    table |= TABLES[table["rope_type"]] if table.get("rope_type") in TABLES and draw(st.booleans()) else {}
    table |= draw(st.dictionaries(st.sampled_from(KNOWN), values, max_size=4))
    config = draw(st.dictionaries(st.sampled_from(["rope_theta", ORIGINAL]), values, max_size=2))
    return config | {draw(st.sampled_from(["rope_scaling", "rope_parameters"])): table}


@settings(max_examples=300, deadline=None)
@given(
    random_configs(JUNK | GOOD), st.sampled_from([None, 1.0]), st.sampled_from([None, *THETAS]), st.integers(1, 10**6)
)
def test_any_config_is_read_with_finite_results_or_refused(config, partial, layer_type, length):
    try:
        fields = fields_of(**config)
        rope = read_rope(fields, HEAD_DIM, layer_type, partial=partial)
        assert 1 <= max_len(fields, rope) <= MAX_LEN
    except CheckpointError as error:
        assert str(error).startswith("config: ") and error.field
    else:
        assert torch.isfinite(inverse_frequencies(rope, length)).all()
        assert all(torch.isfinite(table).all() for table in cos_sin(rope, 20))


@st.composite
def likely_configs(draw):
    """Tables of a kind, most of them valid: a few numbers changed, left out, or given beside the table too."""
    kind = draw(st.sampled_from([*TABLES, "default"]))
    numbers = [name for name, value in TABLES.get(kind, {}).items() if not isinstance(value, list) and name != ORIGINAL]
    table = {"rope_type": kind, **TABLES.get(kind, {})}
    table |= draw(st.dictionaries(st.sampled_from([*numbers, "rope_theta"]), st.sampled_from([0.5, 1, 2, 8.0, 40.0])))
    table |= draw(st.fixed_dictionaries({}, optional={"truncate": st.booleans(), "low_freq_factor": st.just(0.5)}))
    for name in draw(st.sets(st.sampled_from(sorted(table)), max_size=2)):
        del table[name]
    lengths = st.sampled_from([2, 6, 512, 1024, 4096])
    table |= draw(st.fixed_dictionaries({}, optional={ORIGINAL: lengths}))
    config = draw(st.fixed_dictionaries({}, optional={ORIGINAL: lengths, "rope_theta": st.just(5e5)}))
    return config | {draw(st.sampled_from(["rope_scaling", "rope_parameters"])): table}


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(likely_configs())
def test_any_config_that_is_read_means_what_transformers_reads(tmp_path, config):
    try:
        rope = read_rope(fields_of(**config), HEAD_DIM)
    except CheckpointError:
        assume(False)
    try:
        expected = theirs(tmp_path, "llama", config)
    except KeyError as error:
        # It wants to see a null, where we take an absent factor as one.
        assert "'rope_type'='yarn': {'factor'}" in str(error)
        assume(False)
    check(rope, expected, lengths=(100, 5000))


# --- how long a sequence may be ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "expected", "stretched"),
    [
        ({}, 4096, 4096),
        ({"rope_type": "linear", "factor": 2.5}, 10_240, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192, 4096),
        ({"rope_type": "linear", "factor": 0.5}, 4096, 4096),
        ({"rope_type": "llama3", **LLAMA3}, 4096, 4096),
        ({"rope_type": "yarn", **YARN}, 16_384, 4096),
        ({"rope_type": "yarn", **YARN, "factor": 2.0}, 4096, 4096),
        ({"rope_type": "yarn", **YARN, "factor": None}, 4096, 4096),
        ({"rope_type": "longrope", **factors(16), ORIGINAL: 1024}, 4096, 4096),
        ({"rope_type": "linear", "factor": 1e6}, MAX_LEN, 4096),
    ],
    ids=str,
)
def test_the_longest_sequence_follows_the_kind(table, expected, stretched):
    fields = fields_of(rope_parameters=table)
    rope = read_rope(fields, HEAD_DIM)
    assert max_len(fields, rope) == expected
    assert max_len(fields, rope, stretched=True) == stretched
    assert max_len(fields, None) == 4096


# --- logits -----------------------------------------------------------------------------------------------------------

MODELS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {**LLAMA3, ORIGINAL: 32},
    "yarn": {"factor": 16.0, ORIGINAL: 16},
    "longrope": {**factors(16), ORIGINAL: 64, "factor": 8.0},
}


def prompt(num_tokens):
    return torch.randint(0, 256, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens)).tolist()


def check_logits(path, model, num_tokens, max_model_len):
    ids = prompt(num_tokens)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    with engine_of(path, engine={"max_model_len": max_model_len}) as engine:
        for chunk in (None, 17):
            actual = prompt_logits(engine, ids, chunk=chunk)
            assert float((actual - expected).abs().max()) <= 1e-4
    return expected


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("num_tokens", [30, 120])
def test_logits_equal_transformers_within_the_original_length_and_beyond(tmp_path, kind, num_tokens):
    table = {"rope_type": kind, "rope_theta": 10_000.0, **MODELS[kind]}
    path, model = tiny_llama(tmp_path, rope_parameters=table, max_len=64 if kind == "dynamic" else 128, layers=2)
    # transformers takes dynamic and longrope for the prompt's length, which is why the engine is told it.
    expected = check_logits(path, model, num_tokens, 64 if num_tokens == 30 else 120)
    _, plain = tiny_llama(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, layers=2)
    with torch.inference_mode():
        change = float((plain(torch.tensor([prompt(num_tokens)])).logits[0] - expected).abs().max())
    assert change == 0 if kind == "default" or (kind, num_tokens) == ("dynamic", 30) else change > 0.1


def test_both_spellings_of_a_base_give_the_logits_of_transformers(tmp_path):
    path, model = tiny_llama(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, layers=2)
    check_logits(path, model, 110, 128)
    edit_json(path / "config.json", rope_parameters=..., rope_theta=500_000.0, rope_scaling=None)
    check_logits(path, model, 110, 128)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_token_turns_alike_however_long_its_sequence_gets(tmp_path, kind):
    table = {"rope_type": kind, "rope_theta": 10_000.0, **MODELS[kind]}
    path, _ = tiny_llama(tmp_path, rope_parameters=table, max_len=64, layers=2)
    ids = list(range(100))
    with engine_of(path, engine={"max_model_len": 120} if kind == "dynamic" else {}) as engine:
        length = engine.parts.engine.max_model_len
        whole = prompt_logits(engine, ids[: length - 1])
        for num_tokens in (1, 20, 60):
            torch.testing.assert_close(prompt_logits(engine, ids[:num_tokens]), whole[:num_tokens], rtol=0, atol=1e-4)
