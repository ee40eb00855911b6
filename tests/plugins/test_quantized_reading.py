"""The loader `quantized`: bytes made by hand against float64 and compressed-tensors' decoder, and hostile folders."""

import json

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import CACHE
from intarsia import Engine, SamplingParams
from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, StoredWeight, Unfit
from intarsia_quantized.loader import fit
from intarsia_quantized.options import QuantizedOptions
from models import edit_json, tiny_llama
from quantized import (
    TOKENS,
    as_tensor,
    awq_tensors,
    compressed_config,
    folder_of,
    gptq_tensors,
    open_folder,
    pack_rows,
    packed_tensors,
    quantize_folder,
    random_matrix,
    read,
    weights,
)

NAME = "model.layers.0.mlp.up_proj"


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_folder(path)
        for tensor in checkpoint.tensors.values():
            read(tensor)
    return str(caught.value)


def check(checkpoint, exact, *, format_name):
    """Hold the one matrix of a folder to what it stands for; return its weight."""
    assert list(checkpoint.tensors) == [f"{NAME}.weight"], "helper tensors are not visible"
    tensor = checkpoint.tensors[f"{NAME}.weight"]
    assert tensor.shape == exact.shape
    np.testing.assert_allclose(read(tensor).double().numpy(), exact, rtol=2e-7, atol=0)
    if format_name is None:
        assert not isinstance(tensor, StoredWeight)
        return None
    assert isinstance(tensor, StoredWeight)
    assert tensor.weight_format.name == format_name
    weight = tensor.read_weight()
    assert weight.format == tensor.weight_format and weight.shape == exact.shape
    np.testing.assert_allclose(weight.dequantize().double().numpy(), exact, rtol=2e-7, atol=1e-9)
    return weight


# --- GPTQ -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "expected"),
    [
        (4, 128, True, "int4_g128_a16"),
        (4, 64, False, "int4_g64_zero_a16"),
        (4, 32, False, "int4_g32_zero_a16"),
        (4, None, True, "int4_g128_a16"),
        (4, None, False, "int4_g128_zero_a16"),
        (4, 96, True, "int4_g32_a16"),
        (4, 256, False, "int4_g128_zero_a16"),
        (4, 8, False, None),
        (8, 128, True, "int8_g128_a16"),
        (8, 32, False, "int8_g32_min_a16"),
        (8, None, True, "int8_a16"),
        (8, None, False, "int8_g128_min_a16"),
    ],
)
def test_gptq_stands_for_its_numbers(tmp_path, bits, group, symmetric, expected, less_one):
    q, zero, scale, exact = random_matrix(24, 200, bits=bits, group=group, symmetric=symmetric)
    if less_one:
        zero = np.maximum(zero, 1)
        exact = (q - zero[:, np.arange(200) // (group or 200)]) * scale.double().numpy()[
            :, np.arange(200) // (group or 200)
        ]
    tensors = gptq_tensors(NAME, q, zero, scale, bits=bits, group=group, less_one=less_one)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": False,
        "checkpoint_format": "gptq" if less_one else "gptq_v2",
    }
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name=expected)


def test_gptq_zero_points_of_0_borrow_from_their_word_as_gptqmodel_stores_them(tmp_path):
    q, zero, scale, exact = random_matrix(8, 64, bits=4, group=64, symmetric=False)
    zero[:] = np.array([0, 8, 0, 15, 1, 0, 3, 9])[:, None]
    exact = (q - zero) * scale.double().numpy()
    tensors = gptq_tensors(NAME, q, zero, scale, bits=4, group=64, less_one=False)
    words = tensors[f"{NAME}.qzeros"].numpy().view(np.uint32) - np.uint32(0x11111111)
    tensors[f"{NAME}.qzeros"] = as_tensor(words.view(np.int32))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "checkpoint_format": "gptq"}
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name="int4_g64_zero_a16")


@pytest.mark.parametrize("bits", [4, 8])
def test_columns_that_gptq_permuted_are_read_as_floats(tmp_path, bits):
    group_of = np.random.default_rng(1).permutation(np.arange(128) // 32)
    q, zero, scale, exact = random_matrix(16, 128, bits=bits, group=32, symmetric=False, group_of=group_of)
    tensors = gptq_tensors(NAME, q, zero, scale, bits=bits, group=32, less_one=False, group_of=group_of)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"}
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name=None)
    assert "desc_act is false" in refusal(folder_of(tmp_path, tensors, config | {"desc_act": False}))


def test_gptq_with_desc_act_stays_as_it_is_where_its_columns_are_in_order(tmp_path):
    q, zero, scale, exact = random_matrix(16, 128, bits=4, group=32, symmetric=True)
    tensors = gptq_tensors(NAME, q, zero, scale, bits=4, group=32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name="int4_g32_a16")


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 3}, "quantization_config.bits is 3, not 4 or 8"),
        ({"bits": True}, "quantization_config.bits"),
        ({"bits": 8}, "qzeros"),
        ({"group_size": 0}, "quantization_config.group_size is 0"),
        ({"group_size": 64}, "qzeros"),
        ({"group_size": 2**70}, "quantization_config.group_size"),
        ({"sym": "yes"}, "quantization_config.sym"),
        ({"checkpoint_format": "gptq_v2"}, "zero points other than 8"),
        ({"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"quant_method": "gtpq"}, "Did you mean 'gptq'?"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method is 'bitsandbytes'"),
    ],
)
def test_a_gptq_config_that_its_tensors_contradict_is_refused(tmp_path, changes, said):
    q, zero, scale, _ = random_matrix(16, 128, bits=4, group=32, symmetric=True)
    tensors = gptq_tensors(NAME, q, zero, scale, bits=4, group=32)
    assert said in refusal(folder_of(tmp_path, tensors, GPTQ | changes))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("qzeros", None, "without"),
        ("scales", None, "without"),
        ("qweight", None, "without"),
        ("scales", torch.full((4, 16), float("nan")), "NaN"),
        ("scales", torch.full((4, 16), float("inf")), "infinity"),
        ("scales", torch.full((4, 16), 3e38), "past"),
        ("scales", torch.ones(4, 15), "shape"),
        ("scales", torch.ones(4, 16, dtype=torch.int32), "stored as I32"),
        ("qweight", torch.zeros(16, 16), "stored as F32"),
        ("qweight", torch.zeros(16, 15, dtype=torch.int32), "not a multiple of 8"),
        ("qweight", torch.zeros(0, 16, dtype=torch.int32), "shape"),
        ("qweight", torch.zeros(16, dtype=torch.int32), "shape"),
        ("g_idx", torch.full((128,), 4, dtype=torch.int32), "beyond the 4"),
        ("g_idx", torch.full((128,), -1, dtype=torch.int32), "beyond the 4"),
        ("weight", torch.zeros(16, 128), "both"),
    ],
)
def test_gptq_tensors_that_are_malformed_are_refused_by_name(tmp_path, part, value, said):
    q, zero, scale, _ = random_matrix(16, 128, bits=4, group=32, symmetric=True)
    tensors = gptq_tensors(NAME, q, zero, scale, bits=4, group=32) | {f"{NAME}.{part}": value}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    message = refusal(folder_of(tmp_path, tensors, GPTQ))
    assert said in message and NAME in message


# --- AWQ --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "columns"), [(32, 96), (64, 192), (128, 128), (64, 96), (-1, 96)])
def test_awq_stands_for_its_numbers(tmp_path, group, columns):
    grouped = None if group == -1 else group
    q, zero, scale, exact = random_matrix(40, columns, bits=4, group=grouped, symmetric=False)
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "GEMM"}
    expected = f"int4_g{128 if group == -1 else group}_zero_a16"
    check(open_folder(folder_of(tmp_path, awq_tensors(NAME, q, zero, scale), config)), exact, format_name=expected)


def test_awq_equals_the_decoder_of_compressed_tensors(tmp_path):
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    generator = torch.Generator().manual_seed(0)
    info = torch.iinfo(torch.int32)
    qweight = torch.randint(info.min, info.max, (64, 5), dtype=torch.int32, generator=generator)
    qzeros = torch.randint(info.min, info.max, (2, 5), dtype=torch.int32, generator=generator)
    scales = torch.rand(2, 40, generator=generator).half()
    numbers, scale, zero = AutoAWQConverter(group_size=32)._convert_gemm_module(qweight, scales, qzeros)
    spread = torch.arange(64) // 32
    expected = (numbers.double() - zero.double()[:, spread]) * scale.double()[:, spread]
    tensors = {f"{NAME}.qweight": qweight, f"{NAME}.qzeros": qzeros, f"{NAME}.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    check(open_folder(folder_of(tmp_path, tensors, config)), expected.numpy(), format_name="int4_g32_zero_a16")


def test_awq_without_zero_points_is_symmetric(tmp_path):
    q, zero, scale, exact = random_matrix(16, 64, bits=4, group=64, symmetric=True)
    tensors = awq_tensors(NAME, q, zero, scale)
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}
    assert "zero_point is false" in refusal(folder_of(tmp_path, tensors, config))
    del tensors[f"{NAME}.qzeros"]
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name="int4_g64_a16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 8}, "quantization_config.bits is 8"),
        ({"version": "gemv"}, "quantization_config.version is 'gemv'"),
        ({"version": 1}, "quantization_config.version"),
        ({"group_size": 32}, "scales"),
        ({"group_size": "64"}, "quantization_config.group_size"),
    ],
)
def test_an_awq_config_that_its_tensors_contradict_is_refused(tmp_path, changes, said):
    q, zero, scale, _ = random_matrix(16, 64, bits=4, group=64, symmetric=False)
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True} | changes
    assert said in refusal(folder_of(tmp_path, awq_tensors(NAME, q, zero, scale), config))


# --- compressed-tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "columns", "expected"),
    [
        (4, 128, True, 256, "int4_g128_a16"),
        (4, 32, False, 96, "int4_g32_zero_a16"),
        (4, 64, True, 96, "int4_g64_a16"),  # a ragged last group
        (4, None, True, 75, "int4_g128_a16"),  # an odd column
        (4, None, False, 33, "int4_g128_zero_a16"),
        (8, None, True, 77, "int8_a16"),
        (8, 32, True, 96, "int8_g32_a16"),
        (8, 128, False, 300, "int8_g128_min_a16"),
    ],
)
def test_pack_quantized_stands_for_its_numbers(tmp_path, bits, group, symmetric, columns, expected, dtype):
    outs = 21  # not a multiple of the numbers of a word
    q, zero, scale, exact = random_matrix(outs, columns, bits=bits, group=group, symmetric=symmetric, dtype=dtype)
    tensors = packed_tensors(NAME, q, zero, scale, bits=bits, symmetric=symmetric)
    config = compressed_config(weights(bits, group=group, symmetric=symmetric))
    tolerated = 2e-6 if (dtype, expected) == (torch.float32, "int8_g128_min_a16") else 1e-9
    checkpoint = open_folder(folder_of(tmp_path, tensors, config))
    if tolerated == 1e-9:
        check(checkpoint, exact, format_name=expected)
    tensor = checkpoint.tensors[f"{NAME}.weight"]
    np.testing.assert_allclose(tensor.read_weight().dequantize().double().numpy(), exact, rtol=2e-6, atol=tolerated)
    if group is None or columns % group == 0:
        # The library's own decoder, in float32; it takes no ragged group.
        scheme = QuantizationScheme(targets=["Linear"], weights=weights(bits, group=group, symmetric=symmetric))
        local = {name.rpartition(".")[2]: value for name, value in tensors.items()}
        local["weight_scale"] = local["weight_scale"].float()
        theirs = BaseCompressor.get_value_from_registry("pack-quantized").decompress(local, scheme)["weight"]
        torch.testing.assert_close(read(tensor), theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("form", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "expected"),
    [
        (8, None, True, "int8"),
        (8, None, False, "int8_g128_min"),
        (8, 32, True, "int8_g32"),
        (4, 32, True, "int4_g32"),
        (4, 32, False, "int4_g32_zero"),
    ],
)
def test_int_quantized_stands_for_its_numbers(tmp_path, form, bits, group, symmetric, expected):
    q, zero, scale, exact = random_matrix(20, 96, bits=bits, group=group, symmetric=symmetric, dtype=torch.bfloat16)
    middle = 1 << (bits - 1)
    tensors = {f"{NAME}.weight": as_tensor((q - middle).astype(np.int8)), f"{NAME}.weight_scale": scale}
    if not symmetric:
        tensors[f"{NAME}.weight_zero_point"] = as_tensor((zero - middle).astype(np.int8))
    config = compressed_config(weights(bits, group=group, symmetric=symmetric), form=form, inputs=TOKENS)
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name=expected)


def test_scales_of_activations_are_part_of_a_module_and_one_scale_may_serve_a_matrix(tmp_path):
    q, _, _, _ = random_matrix(20, 96, bits=8, group=None, symmetric=True)
    scale = torch.tensor([0.01171875])
    tensors = {
        f"{NAME}.weight": as_tensor((q - 128).astype(np.int8)),
        f"{NAME}.weight_scale": scale,
        f"{NAME}.input_scale": torch.tensor([0.1]),
        f"{NAME}.input_zero_point": torch.tensor([3], dtype=torch.int8),
    }
    static = TOKENS | {"dynamic": False, "strategy": "tensor", "symmetric": False}
    config = compressed_config(weights(8, strategy="tensor"), form="int-quantized", inputs=static)
    check(open_folder(folder_of(tmp_path, tensors, config)), (q - 128) * 0.01171875, format_name="int8")


def test_older_folders_call_it_compression_config(tmp_path):
    q, zero, scale, exact = random_matrix(16, 64, bits=4, group=32, symmetric=True)
    tensors = packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True)
    config = compressed_config(weights(4, group=32))
    del config["quant_method"]
    path = folder_of(tmp_path, tensors, config, key="compression_config")
    checkpoint = open_folder(path)
    check(checkpoint, exact, format_name="int4_g32_a16")
    assert "compression_config" not in checkpoint.config


def test_columns_that_compressed_tensors_permuted_are_read_as_floats(tmp_path):
    group_of = np.random.default_rng(1).permutation(np.arange(128) // 32)
    q, zero, scale, exact = random_matrix(16, 128, bits=4, group=32, symmetric=True, group_of=group_of)
    tensors = packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True)
    tensors[f"{NAME}.weight_g_idx"] = as_tensor(group_of.astype(np.int32))
    config = compressed_config(weights(4, group=32, actorder="group"))
    check(open_folder(folder_of(tmp_path, tensors, config)), exact, format_name=None)
    unasked = compressed_config(weights(4, group=32, actorder="weight"))
    assert "weight_g_idx" in refusal(folder_of(tmp_path, tensors, unasked))


def test_each_module_has_the_scheme_that_its_tensors_have_the_shapes_of(tmp_path):
    first = random_matrix(16, 64, bits=4, group=32, symmetric=True)
    second = random_matrix(16, 64, bits=8, group=None, symmetric=True, seed=1)
    tensors = packed_tensors("a.q_proj", *first[:3], bits=4, symmetric=True)
    tensors |= packed_tensors("a.down_proj", *second[:3], bits=8, symmetric=True)
    config = compressed_config(weights(4, group=32), targets=["re:.*q_proj$"])
    config["config_groups"]["group_1"] = {"targets": ["re:(a+)+down_proj"], "weights": weights(8)}
    checkpoint = open_folder(folder_of(tmp_path, tensors, config))
    for name, (*_, exact) in (("a.q_proj", first), ("a.down_proj", second)):
        np.testing.assert_allclose(read(checkpoint.tensors[f"{name}.weight"]).double().numpy(), exact, rtol=2e-7)
    assert checkpoint.tensors["a.q_proj.weight"].weight_format.name == "int4_g32_a16"
    assert checkpoint.tensors["a.down_proj.weight"].weight_format.name == "int8_a16"


def test_targets_tell_groups_apart_whose_tensors_look_alike(tmp_path):
    tensors = {}
    for name in ("a.q_proj", "a.k_proj"):
        q, zero, scale, _ = random_matrix(16, 64, bits=8, group=None, symmetric=True)
        tensors |= packed_tensors(name, q, zero, scale, bits=8, symmetric=True)
    config = compressed_config(weights(8), targets=["a.q_proj"], inputs=TOKENS)
    config["config_groups"]["group_1"] = {"targets": ["Linear"], "weights": weights(8)}
    checkpoint = open_folder(folder_of(tmp_path, tensors, config))
    assert checkpoint.tensors["a.q_proj.weight"].weight_format.name == "int8"
    assert checkpoint.tensors["a.k_proj.weight"].weight_format.name == "int8_a16"
    config["config_groups"]["group_1"]["targets"] = ["re:.*k_proj"]
    assert "several groups" in refusal(folder_of(tmp_path, tensors, config))


def test_activations_are_what_the_folder_says_or_what_the_option_says(tmp_path):
    q, zero, scale, _ = random_matrix(16, 64, bits=4, group=32, symmetric=True)
    path = folder_of(
        tmp_path, packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True), compressed_config(weights(4, group=32))
    )
    formats = {
        option: open_folder(path, activations=option).tensors[f"{NAME}.weight"].weight_format.name
        for option in ("auto", "float", "int8")
    }
    assert formats == {"auto": "int4_g32_a16", "float": "int4_g32_a16", "int8": "int4_g32"}


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("format", "float-quantized", "quantization_config.format is 'float-quantized'"),
        ("format", "marlin-24", "quantization_config.format is 'marlin-24'"),
        ("format", "int-quantized", "no group"),
        ("format", ["pack-quantized"], "quantization_config.format"),
        ("quantization_status", "frozen", "quantization_config.quantization_status is 'frozen'"),
        ("transform_config", {"config_groups": {"u": {}}}, "transform_config"),
        ("sparsity_config", {"format": "sparse-bitmask"}, "sparsity_config.format"),
        ("config_groups", {}, "config_groups"),
        ("config_groups", [], "config_groups"),
        ("config_groups", {"W4A16": ["Linear"]}, "W4A16"),
        ("ignore", [NAME], "ignore"),
        ("ignore", "lm_head", "ignore"),
        ("weights.num_bits", 3, "weights.num_bits is 3"),
        ("weights.num_bits", 8, "no group"),
        ("weights.type", "float", "weights.type is 'float'"),
        ("weights.strategy", "block", "weights.strategy is 'block'"),
        ("weights.strategy", "channel", "no group"),
        ("weights.group_size", 64, "no group"),
        ("weights.group_size", None, "weights.group_size is missing"),
        ("weights.group_size", 0, "weights.group_size"),
        ("weights.actorder", "sideways", "weights.actorder is 'sideways'"),
        ("weights.symmetric", False, "weight_zero_point"),
        ("weights.dynamic", True, "weights.dynamic"),
        ("input_activations", {"num_bits": 4, "type": "int"}, "input_activations.num_bits is 4"),
        ("input_activations", {"num_bits": 8, "type": "float"}, "input_activations.type is 'float'"),
        ("output_activations", TOKENS, "output_activations"),
        ("weights", None, "weights"),
        ("targets", "Linear", "targets"),
    ],
)
def test_a_compressed_config_that_is_not_known_or_contradicted_is_refused(tmp_path, where, value, said):
    q, zero, scale, _ = random_matrix(16, 128, bits=4, group=32, symmetric=True)
    config = compressed_config(weights(4, group=32))
    group = config["config_groups"]["group_0"]
    table, _, key = where.rpartition(".")
    target = group["weights"] if table else config if where in config or "config" in where else group
    target[key] = value
    tensors = packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True)
    assert said in refusal(folder_of(tmp_path, tensors, config))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_scale", None, "without"),
        ("weight_shape", None, "without"),
        ("weight_packed", None, "not quantized"),
        ("weight_scale", torch.full((16, 4), float("nan")), "NaN"),
        ("weight_scale", torch.ones(16, 3), "no group"),
        ("weight_scale", torch.ones(16, 4, dtype=torch.float64), "stored as F64"),
        ("weight_shape", torch.tensor([16, 2**62]), "weight_shape"),
        ("weight_shape", torch.tensor([16, -128]), "weight_shape"),
        ("weight_shape", torch.tensor([15, 128]), "weight_shape"),
        ("weight_shape", torch.tensor([16, 120]), "no group"),
        ("weight_zero_point", torch.ones(2, 4, dtype=torch.int32), "symmetric"),
        ("weight_global_scale", torch.ones(1), "not read"),
        ("weight", torch.ones(16, 128), "both"),
    ],
)
def test_compressed_tensors_that_are_malformed_are_refused_by_name(tmp_path, part, value, said):
    q, zero, scale, _ = random_matrix(16, 128, bits=4, group=32, symmetric=True)
    tensors = packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True) | {f"{NAME}.{part}": value}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    message = refusal(folder_of(tmp_path, tensors, compressed_config(weights(4, group=32))))
    assert said in message and NAME in message


def test_numbers_beyond_4_bits_are_refused(tmp_path):
    tensors = {
        f"{NAME}.weight": torch.full((16, 32), 8, dtype=torch.int8),
        f"{NAME}.weight_scale": torch.ones(16, 1),
    }
    config = compressed_config(weights(4), form="int-quantized")
    assert "beyond the 4 bits" in refusal(folder_of(tmp_path, tensors, config))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_config_with_anything_anywhere_is_read_or_refused(tmp_path, data):
    method = data.draw(st.sampled_from(["gptq", "awq", "compressed-tensors"]))
    q, zero, scale, _ = random_matrix(16, 64, bits=4, group=32, symmetric=True)
    if method == "gptq":
        tensors, config = gptq_tensors(NAME, q, zero, scale, bits=4, group=32), dict(GPTQ)
    elif method == "awq":
        tensors, config = (
            awq_tensors(NAME, q, zero, scale),
            {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        )
    else:
        tensors = packed_tensors(NAME, q, zero, scale, bits=4, symmetric=True)
        config = json.loads(json.dumps(compressed_config(weights(4, group=32))))
    tables = [config, *(config.get("config_groups") or {}).values()]
    tables += [table["weights"] for table in tables[1:]]
    for _ in range(data.draw(st.integers(1, 2))):
        table = data.draw(st.sampled_from(tables))
        table[data.draw(st.sampled_from(sorted(table)))] = data.draw(JSON)
    path = folder_of(tmp_path, tensors, config)
    try:
        for tensor in open_folder(path).tensors.values():
            read(tensor)
    except CheckpointError as error:
        assert str(error)


# --- the loader, and whole models -------------------------------------------------------------------------------------


def test_the_loader_fits_folders_that_say_they_are_quantized_and_no_others(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    context = LoaderContext(path=path, options=QuantizedOptions())
    assert isinstance(fit(context), Unfit)
    edit_json(path / "config.json", quantization_config={"quant_method": "unheard"})
    found = fit(context)
    assert isinstance(found, Fit) and found.rank > 50, "above the loader of safetensors"
    assert isinstance(fit(LoaderContext(path=path / "config.json")), Unfit)
    (path / "config.json").write_text("{")
    assert isinstance(fit(context), Unfit)


def rounded(weight, *, bits, group, symmetric):
    """Round a weight to nearest; return q from 0, zero points, scales in fp16, and what they stand for."""
    outs, ins = weight.shape
    groups = weight.double().numpy().reshape(outs, -1, group)
    top = (1 << bits) - 1
    if symmetric:
        scale = (2 * np.abs(groups).max(-1) / top).astype(np.float16)
        zero = np.full(scale.shape, 1 << (bits - 1))
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale), 1, top)
    q = np.clip(np.rint(groups / scale.astype(float)[..., None]) + zero[..., None], 0, top)
    stands = ((q - zero[..., None]) * scale.astype(float)[..., None]).reshape(outs, ins)
    return q.reshape(outs, ins).astype(int), zero.astype(int), torch.from_numpy(scale), torch.from_numpy(stands).float()


def methods():
    def gptq(module, weight):
        q, zero, scale, stands = rounded(weight, bits=4, group=32, symmetric=True)
        return gptq_tensors(module, q, zero, scale, bits=4, group=32), stands

    def awq(module, weight):
        q, zero, scale, stands = rounded(weight, bits=4, group=32, symmetric=False)
        return awq_tensors(module, q, zero, scale), stands

    def packed(module, weight):
        q, zero, scale, stands = rounded(weight, bits=4, group=64, symmetric=False)
        return packed_tensors(module, q, zero, scale, bits=4, symmetric=False), stands

    return {
        "gptq": (gptq, GPTQ),
        "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
        "packed": (packed, compressed_config(weights(4, group=64, symmetric=False))),
    }


@torch.no_grad()
@pytest.mark.parametrize("kept", ["auto", "dense"])
@pytest.mark.parametrize("method", ["gptq", "awq", "packed"])
def test_a_quantized_model_answers_as_transformers_does_with_the_floats_it_stands_for(tmp_path, method, kept):
    path, model = tiny_llama(tmp_path, layers=2)
    replace, config = methods()[method]
    model.load_state_dict(quantize_folder(path, replace))
    edit_json(path / "config.json", quantization_config=config)
    prompt = [72, 101, 108, 108, 111]
    expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    config = {
        "model": {"use": str(path), "weights": kept},
        "engine": {"dtype": "float32", "threads": 1},
        "cache": CACHE,
        "kernels": "torch",
        "runner": "eager",
    }
    with Engine.from_config(config) as engine:
        assert engine.parts.selection("loader").provider.key == "quantized"
        stays = {source.kept.name for source in engine.parts.weight_map.tensors.values() if source.kept is not None}
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
        found = engine.generate([prompt], params)[0].prompt_logprobs
    assert len(stays) == (0 if kept == "dense" else 1)
    for position, entry in enumerate(found[1:], start=1):
        assert entry.logprob == pytest.approx(expected[position - 1, prompt[position]].item(), abs=2e-4)


def test_packing_by_hand_is_the_packing_of_compressed_tensors():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    numbers = np.random.default_rng(0).integers(0, 16, (5, 77))
    theirs = pack_to_int32(torch.from_numpy(numbers - 8).to(torch.int8), 4)
    assert torch.equal(as_tensor(pack_rows(numbers, 4)), theirs)
