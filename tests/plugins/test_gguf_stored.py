"""Matrices that stay in a GGUF file's bits: each type against the gguf package, row order, errors, speed and memory."""

import time

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize

from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat, join
from intarsia.types import StoredWeight
from intarsia_gguf.checkpoint import GgufLoader
from tools import gguf_blocks
from tools import gguf_bytes as gb

SIMPLE = [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
TWO_LEVEL = [kind for kind in gguf_blocks.FORMATS if kind not in SIMPLE]
each_type = pytest.mark.parametrize("kind", gguf_blocks.FORMATS, ids=lambda kind: kind.name)
#: What rounding to float16 can add to a number, of that number; and a little for sums in float32.
ROUNDING = 2.0**-11 * 1.001


def open_with(tmp_path, *tensors, metadata=None, without=()):
    path = tmp_path / "model.gguf"
    others = [tensor for tensor in gb.tiny_tensors() if not tensor[0].startswith(tuple(without) or "-")]
    path.write_bytes(gb.tiny_file(metadata, [*others, *tensors]))
    return GgufLoader(path).open().tensors


def kept(tmp_path, kind, raw, columns):
    """Read a matrix of these bytes as a weight."""
    shape = (len(raw), columns)
    tensor = open_with(tmp_path, ("x.weight", shape, int(kind), raw.tobytes()))["x.weight"]
    assert isinstance(tensor, StoredWeight) and tensor.weight_format.name == gguf_blocks.FORMATS[kind]
    weight = tensor.read_weight()
    assert weight.shape == shape and weight.format == tensor.weight_format
    return weight


def check_layout(weight):
    """The documented dtypes and shapes; and the bytes are those that the format says."""
    fmt, (rows, columns) = weight.format, weight.shape
    numbers, groups = (columns if fmt.bits == 8 else columns // 2), columns // fmt.group
    expected = {"weight": (torch.int8 if fmt.bits == 8 else torch.uint8, (rows, numbers))}
    expected["scale"] = (torch.float16, (rows, groups))
    if fmt.offset == "min":
        expected["min"] = expected["scale"]
    assert {key: (t.dtype, tuple(t.shape)) for key, t in weight.tensors.items()} == expected
    assert all(tensor.is_contiguous() for tensor in weight.tensors.values())
    assert weight.num_bytes == fmt.num_bytes(weight.shape)


@pytest.mark.parametrize("kind", SIMPLE, ids=lambda kind: kind.name)
def test_quantized_numbers_are_kept_bit_for_bit(kind, tmp_path):
    # More rows than one block holds, and the last block is not full.
    values = np.random.default_rng(int(kind)).standard_normal((157, 1024)).astype("<f4")
    values[3] = 0
    raw = quantize(values, kind)
    weight = kept(tmp_path, kind, raw, 1024)
    check_layout(weight)
    assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(raw, kind)))
    assert not weight.dequantize()[3].any()


@each_type
def test_any_bits_under_scales_that_float16_holds_are_kept_bit_for_bit(kind, tmp_path):
    # A power of two times whole numbers of 8 bits is a float16, so K types must be exact here too.
    raw = gguf_blocks.random_blocks(kind, (157, 1024), scale=2.0**-9, minimum=-(2.0**-7))
    weight = kept(tmp_path, kind, raw, 1024)
    check_layout(weight)
    expected = torch.from_numpy(dequantize(raw, kind))
    assert expected.std() > 2.0**-9
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("kind", TWO_LEVEL, ids=lambda kind: kind.name)
@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["normal", "subnormal"])
def test_scales_of_two_levels_are_rounded_once(kind, size, tmp_path):
    raw = gguf_blocks.random_blocks(kind, (64, 1024), scale=1.23e-3 * size, minimum=4.56e-3 * size)
    weight = kept(tmp_path, kind, raw, 1024)
    expected = dequantize(raw, kind).astype(np.float64)
    # What scales and what minima alone stand for; a float16 that is subnormal is a whole number of 2^-24.
    scaled = dequantize(gguf_blocks.without_minima(kind, raw), kind).astype(np.float64)
    bound = (np.abs(scaled) + np.abs(expected - scaled)) * ROUNDING
    error = np.abs(weight.dequantize().double().numpy() - expected)
    assert (error <= bound + 1e-12).all()
    if size == 1:
        assert error.max() > 0, "rounding must show, or this test says nothing"


@pytest.mark.parametrize("kind", [Kind.IQ4_NL, Kind.IQ4_XS, Kind.TQ1_0, Kind.IQ2_XXS, Kind.F16, Kind.BF16])
def test_other_types_are_plain_numbers(kind, tmp_path):
    group, group_bytes = GGML_QUANT_SIZES[kind]
    raw = np.zeros((4, 256 // group * group_bytes), np.uint8)
    tensor = open_with(tmp_path, ("x.weight", (4, 256), int(kind), raw.tobytes()))["x.weight"]
    assert not isinstance(tensor, StoredWeight) and tensor.format == kind.name


def test_a_quantized_vector_is_plain_numbers(tmp_path):
    raw = quantize(np.ones((1, 64), "<f4"), Kind.Q8_0)
    tensor = open_with(tmp_path, ("x.bias", (64,), gb.T_Q8_0, raw.tobytes()))["x.bias"]
    assert not isinstance(tensor, StoredWeight)


def test_a_matrix_that_is_stored_the_other_way_round_is_plain_numbers(tmp_path):
    keys = {f"gpt2.{name.partition('.')[2]}": value for name, value in gb.tiny_metadata().items() if "llama." in name}
    keys["general.architecture"] = (gb.STRING, "gpt2")
    keys["gpt2.attention.layer_norm_epsilon"] = (gb.F32, 1e-5)
    raw = quantize(np.ones((96, 32), "<f4"), Kind.Q8_0)
    path = tmp_path / "model.gguf"
    stored = ("blk.0.attn_qkv.weight", (96, 32), gb.T_Q8_0, raw.tobytes())
    path.write_bytes(gb.tiny_file(keys, [*gb.tiny_tensors()[:1], stored]))
    tensor = GgufLoader(path).open().tensors["transformer.h.0.attn.c_attn.weight"]
    assert tensor.format == "Q8_0" and not isinstance(tensor, StoredWeight)


# --- rows -------------------------------------------------------------------------------------------------------------


def as_llama_cpp_orders(rows, num_heads):
    """Rows as llama.cpp wants them, written out: of a head, first i, then i + half, for each i."""
    head_dim = len(rows) // num_heads
    half = head_dim // 2
    return rows[
        [head * head_dim + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    ]


@each_type
def test_rows_come_back_in_hugging_faces_order(kind, tmp_path):
    # Heads of 64 rows, more than a block.
    raw = gguf_blocks.random_blocks(kind, (37 * 64, 256), scale=2.0**-9, minimum=-(2.0**-7))
    metadata = {"llama.attention.key_length": (gb.U32, 64), "llama.attention.value_length": (gb.U32, 64)}
    stored = as_llama_cpp_orders(raw, 37).tobytes()
    tensors = open_with(
        tmp_path,
        ("blk.0.attn_q.weight", (37 * 64, 256), int(kind), stored),
        metadata=metadata,
        without=["blk.0.attn_"],
    )
    weight = tensors["model.layers.0.self_attn.q_proj.weight"].read_weight()
    check_layout(weight)
    assert torch.equal(weight.dequantize(), torch.from_numpy(dequantize(raw, kind)))


def test_parts_of_a_fused_tensor_are_weights_of_their_own(tmp_path):
    # Phi-3 has one tensor for queries, keys and values: of 4 heads and 2 key-value heads of 16 rows.
    metadata = {
        "llama.attention.head_count": (gb.U32, 4),
        "llama.attention.head_count_kv": (gb.U32, 2),
        "llama.attention.key_length": (gb.U32, 16),
        "llama.attention.value_length": (gb.U32, 16),
    }
    raw = gguf_blocks.random_blocks(Kind.Q4_K, (128, 256), scale=2.0**-9, minimum=2.0**-7)
    rows = np.concatenate([as_llama_cpp_orders(raw[:64], 4), as_llama_cpp_orders(raw[64:96], 2), raw[96:]])
    fused = ("blk.0.attn_qkv.weight", (128, 256), gb.T_Q4_K, rows.tobytes())
    tensors = open_with(tmp_path, fused, metadata=metadata, without=["blk.0.attn_"])
    expected = torch.from_numpy(dequantize(raw, Kind.Q4_K))
    for name, start, stop in (("q", 0, 64), ("k", 64, 96), ("v", 96, 128)):
        weight = tensors[f"model.layers.0.self_attn.{name}_proj.weight"].read_weight()
        assert torch.equal(weight.dequantize(), expected[start:stop])


def test_each_expert_of_a_stack_is_a_weight(tmp_path):
    raw = gguf_blocks.random_blocks(Kind.Q6_K, (3 * 96, 256), scale=2.0**-9, minimum=0)
    keys = {"llama.expert_count": (gb.U32, 3), "llama.expert_used_count": (gb.U32, 2)}
    stack = ("blk.0.ffn_gate_up_exps.weight", (3, 96, 256), int(Kind.Q6_K), raw.tobytes())
    tensors = open_with(tmp_path, stack, metadata=keys)
    expected = torch.from_numpy(dequantize(raw, Kind.Q6_K)).view(3, 2, 48, 256)
    for expert in range(3):
        for half, name in enumerate(("w1", "w3")):
            tensor = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"]
            assert torch.equal(tensor.read_weight().dequantize(), expected[expert, half])


@pytest.mark.parametrize(
    "kinds, common",
    [
        ((Kind.Q4_K, Kind.Q4_K, Kind.Q6_K), "int8_g16_min"),  # Q4_K_M
        ((Kind.Q5_K, Kind.Q5_K, Kind.Q6_K), "int8_g16_min"),  # Q5_K_M
        ((Kind.Q3_K, Kind.Q3_K, Kind.Q5_K), "int8_g16_min"),  # Q3_K_M
        ((Kind.Q2_K, Kind.Q2_K, Kind.Q4_K), "int4_g16_min"),  # Q2_K
        ((Kind.Q2_K, Kind.Q2_K, Kind.Q3_K), "int4_g16_min"),
        ((Kind.Q5_0, Kind.Q5_0, Kind.Q8_0), "int8_g32"),  # Q4_K_M where 256 columns do not divide a row
        ((Kind.Q4_0, Kind.Q4_1, Kind.Q4_0), "int4_g32_min"),
    ],
)
def test_queries_keys_and_values_of_several_types_are_laid_end_to_end_exactly(kinds, common, tmp_path):
    weights, expected = [], []
    for number, kind in enumerate(kinds):
        raw = gguf_blocks.random_blocks(kind, (40 + number, 512), scale=2.0**-9, minimum=2.0**-7)
        weights.append(kept(tmp_path, kind, raw, 512))
        expected.append(torch.from_numpy(dequantize(raw, kind)))
    joined = join(weights)
    assert joined.format.name == common and isinstance(joined.format, IntegerFormat)
    assert torch.equal(joined.dequantize(), torch.cat(expected))


# --- files that are wrong ---------------------------------------------------------------------------------------------


@each_type
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_scale_that_is_not_finite_is_refused_with_the_tensors_name(kind, value, tmp_path):
    raw = gguf_blocks.random_blocks(kind, (8, 512), scale=1e-3, minimum=1e-3)
    gguf_blocks.set_float(kind, raw, row=5, scale=value)
    with pytest.raises(CheckpointError, match=rf"'x.weight' is {kind.name} and has a scale that is not finite"):
        kept(tmp_path, kind, raw, 512)


@pytest.mark.parametrize(
    "kind", [k for k in gguf_blocks.FORMATS if gguf_blocks.FORMATS[k].endswith("min")], ids=lambda kind: kind.name
)
def test_a_minimum_that_is_not_finite_is_refused(kind, tmp_path):
    raw = gguf_blocks.random_blocks(kind, (8, 512), scale=1e-3, minimum=1e-3)
    gguf_blocks.set_float(kind, raw, row=7, minimum=np.inf)
    with pytest.raises(CheckpointError, match=r"has a min that is not finite"):
        kept(tmp_path, kind, raw, 512)


@pytest.mark.parametrize("kind", TWO_LEVEL, ids=lambda kind: kind.name)
def test_a_scale_that_float16_cannot_hold_is_refused_and_dense_reads_it(kind, tmp_path):
    raw = gguf_blocks.random_blocks(kind, (64, 512), scale=60_000.0, minimum=0.0)
    with pytest.raises(CheckpointError, match=r"too large for float16; model.weights = 'dense' reads it"):
        kept(tmp_path, kind, raw, 512)
    tensor = open_with(tmp_path, ("x.weight", (64, 512), int(kind), raw.tobytes()))["x.weight"]
    out = torch.empty(64, 512)
    tensor.read(out)
    assert out.isfinite().all() and torch.equal(out, torch.from_numpy(dequantize(raw, kind)))


def test_a_file_that_is_cut_while_open_is_an_error(tmp_path):
    raw = quantize(np.ones((1000, 64), "<f4"), Kind.Q8_0)
    tensors = open_with(tmp_path, ("x.weight", (1000, 64), gb.T_Q8_0, raw.tobytes()))
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match=r"x\.weight"):
        tensors["x.weight"].read_weight()


@pytest.mark.parametrize("kind, columns", [(Kind.Q4_1, 48), (Kind.Q4_K, 576), (Kind.Q6_K, 576)])
def test_rows_that_are_no_whole_groups_are_refused_with_the_tensors_name(kind, columns, tmp_path):
    group, group_bytes = GGML_QUANT_SIZES[kind]
    raw = bytes(2 * -(-columns // group) * group_bytes)
    with pytest.raises(CheckpointError, match=r"x\.weight"):
        open_with(tmp_path, ("x.weight", (2, columns), int(kind), raw))


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return GgufLoader(gb.smollm2_path()).open()


def test_smollm2s_matrices_are_kept_bit_for_bit(smollm2):
    matrices = {name: tensor for name, tensor in smollm2.tensors.items() if isinstance(tensor, StoredWeight)}
    assert len(matrices) == 211
    assert {tensor.weight_format.name for tensor in matrices.values()} == {"int4_g32_min", "int8_g32"}
    for name in list(matrices)[::17]:
        expected = torch.empty(matrices[name].shape)
        matrices[name].read(expected)
        weight = matrices[name].read_weight()
        assert torch.equal(weight.dequantize(), expected)
        assert weight.num_bytes == matrices[name].num_bytes, "as many bytes as in the file"


def test_smollm2_is_unpacked_in_a_second_on_one_thread(smollm2):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        started = time.process_time()
        for tensor in smollm2.tensors.values():
            if isinstance(tensor, StoredWeight):
                tensor.read_weight()
        assert time.process_time() - started < 1
    finally:
        torch.set_num_threads(threads)


def test_every_type_is_unpacked_about_as_fast(tmp_path):
    """None may be an order slower than 100 million numbers a second: files of billions load in tens of seconds."""
    for kind in gguf_blocks.FORMATS:
        raw = gguf_blocks.random_blocks(kind, (1024, 4096), scale=1e-3, minimum=1e-3)
        tensor = open_with(tmp_path, ("x.weight", (1024, 4096), int(kind), raw.tobytes()))["x.weight"]
        taken = []
        for _ in range(3):
            started = time.process_time()
            tensor.read_weight()
            taken.append(time.process_time() - started)
        assert min(taken) < 0.4, kind.name
