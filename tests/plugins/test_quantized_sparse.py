"""2:4 sparse folders: the published legacy format from bytes made by hand, and our own, written and read back."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from intarsia import Engine
from intarsia.cli.program import program
from intarsia.errors import CheckpointError
from intarsia.testing import prompt_logits
from intarsia.types import StoredWeight
from models import tiny_llama
from quantized import TOKENS, as_tensor, compressed_config, folder_of, open_folder, read, weights

NAME = "model.layers.0.mlp.up_proj"
PROMPT = [72, 101, 108, 108, 111]
LEGACY = {
    "quant_method": "compressed-tensors",
    "sparsity_config": {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"]},
}


def sparse_matrix(outs, ins, *, seed=0):
    """Return a 2:4 matrix of whole numbers in float64; some groups keep one number, or none."""
    rng = np.random.default_rng(seed)
    matrix = np.zeros((outs, ins))
    for row in range(outs):
        for group in range(0, ins, 4):
            kept = rng.choice(4, 2, replace=False)
            for column in kept[: rng.integers(0, 3)]:
                matrix[row, group + column] = rng.integers(-127, 128)
    return matrix


def legacy_tensors(matrix, values_dtype):
    """Pack a matrix bit by bit: two columns a group are kept, those that are not 0 among them."""
    outs, ins = matrix.shape
    values, bits = [], np.zeros((outs, -(-ins // 8)), np.uint8)
    for row in range(outs):
        for group in range(0, ins, 4):
            columns = [column for column in range(4) if matrix[row, group + column]]
            columns += [column for column in range(4) if column not in columns][: 2 - len(columns)]
            for column in sorted(columns):
                values.append(matrix[row, group + column])
                bits[row, (group + column) // 8] |= 1 << ((group + column) % 8)
    return {
        f"{NAME}.compressed": as_tensor(np.array(values).reshape(outs, ins // 2), values_dtype),
        f"{NAME}.bitmask": as_tensor(bits),
        f"{NAME}.shape": torch.tensor([[outs], [ins]]),
    }


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        for tensor in open_folder(path).tensors.values():
            read(tensor)
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6, 8), (5, 12), (3, 36)])
def test_the_legacy_format_stands_for_its_numbers(tmp_path, dtype, shape):
    matrix = sparse_matrix(*shape)
    tensors = legacy_tensors(matrix, dtype) | {f"{NAME}.bias": torch.ones(shape[0])}
    checkpoint = open_folder(folder_of(tmp_path, tensors, LEGACY))
    assert checkpoint.tensors.keys() == {f"{NAME}.weight", f"{NAME}.bias"}
    tensor = checkpoint.tensors[f"{NAME}.weight"]
    assert isinstance(tensor, StoredWeight) and tensor.weight_format.name == "sparse24"
    np.testing.assert_array_equal(read(tensor).double().numpy(), matrix)
    weight = tensor.read_weight()
    np.testing.assert_array_equal(weight.dequantize().double().numpy(), matrix)
    assert weight.format == tensor.weight_format and weight.num_bytes == tensor.weight_format.num_bytes(shape)


def test_the_legacy_format_holds_int8_with_a_scale_a_row(tmp_path):
    matrix = sparse_matrix(7, 24)
    scale = torch.rand(7, 1, dtype=torch.float64).bfloat16()
    tensors = legacy_tensors(matrix, torch.int8) | {f"{NAME}.weight_scale": scale}
    config = compressed_config(weights(8), form="int-quantized", inputs=TOKENS) | {
        "sparsity_config": LEGACY["sparsity_config"]
    }
    tensor = open_folder(folder_of(tmp_path, tensors, config)).tensors[f"{NAME}.weight"]
    assert tensor.weight_format.name == "sparse24_int8"
    np.testing.assert_allclose(read(tensor).double().numpy(), matrix * scale.double().numpy(), rtol=1e-7)
    assert "no group" in refusal(folder_of(tmp_path, tensors, config | compressed_config(weights(4, group=32))))


def test_the_bitmask_is_that_of_compressed_tensors():
    from compressed_tensors.utils.helpers import pack_bitmasks

    matrix = np.where(sparse_matrix(5, 12) == 0, 0, 1)
    full = np.zeros_like(matrix)
    full[:, 1::4] = full[:, 3::4] = 1
    packed = legacy_tensors(full.astype(float), torch.float32)[f"{NAME}.bitmask"]
    assert torch.equal(packed, pack_bitmasks(torch.from_numpy(full).bool()))


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("bitmask", None, "without"),
        ("shape", None, "without"),
        ("compressed", None, "without"),
        ("bitmask", torch.full((6, 1), 0b11110001, dtype=torch.uint8), "keeps other than 2 of 4"),
        ("bitmask", torch.zeros(6, 2, dtype=torch.uint8), "shape"),
        ("shape", torch.tensor([6, 6]), "multiple of 4"),
        ("shape", torch.tensor([6, 2**62]), "shape"),
        ("shape", torch.tensor([-6, 8]), "-6 by 8"),
        ("shape", torch.tensor([6, 8, 1]), "not (2,)"),
        ("compressed", torch.zeros(6, 4, dtype=torch.int8), "without"),
        ("compressed", torch.zeros(6, 4, dtype=torch.int32), "I32"),
        ("row_offsets", torch.zeros(6), "row_offsets"),
    ],
)
def test_a_legacy_module_that_is_malformed_is_refused(tmp_path, part, value, said):
    tensors = legacy_tensors(sparse_matrix(6, 8), torch.float32) | {f"{NAME}.{part}": value}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert said in refusal(folder_of(tmp_path, tensors, LEGACY))


@pytest.mark.parametrize("options", [{}, {"values": "int8"}])
def test_our_own_folder_is_read_back_to_the_same_bits_and_runs(tmp_path, options):
    model, _ = tiny_llama(tmp_path, layers=2)
    out = tmp_path / "out"
    overrides = [f"-oquantizer.{name}={json.dumps(value)}" for name, value in options.items()]
    arguments = [str(model), "--to", "sparse24", "--out", str(out), "--dtype", "float32", *overrides]
    program.main(["quantize", *arguments], standalone_mode=False)
    config = {"engine": {"dtype": "float32"}, "cache": {"memory": "64MiB"}, "kernels": "torch", "runner": "eager"}
    quantizer = {"quantizer": {"use": "sparse24", **options}}
    with Engine.from_config(config | {"model": str(model)} | quantizer) as engine:
        expected = prompt_logits(engine, PROMPT)
    for kept in ("auto", "dense"):
        with Engine.from_config(config | {"model": {"use": str(out), "weights": kept}}) as engine:
            torch.testing.assert_close(prompt_logits(engine, PROMPT), expected, rtol=0, atol=1e-5)
            stays = {source.kept.name for source in engine.parts.weight_map.tensors.values() if source.kept}
    assert not stays
    assert json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"] == "intarsia"
    plain = load_file(model / "model.safetensors")
    for name, tensor in open_folder(out).tensors.items():
        if isinstance(tensor, StoredWeight) and not options:
            values = read(tensor)
            kept_numbers = values != 0
            assert torch.equal(values[kept_numbers], plain[name][kept_numbers])
            assert (kept_numbers.view(len(values), -1, 4).sum(-1) <= 2).all()


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("weight_indices", None, "without"),
        ("weight_values", None, "without"),
        ("weight_indices", 0, "out of their order"),
        ("weight_indices", 255, "out of their order"),
        ("weight_shape", torch.tensor([64, 60]), "shape"),
        ("weight_shape", torch.tensor([64, 2**61]), "shape"),
        ("weight", torch.zeros(64, 64), "both"),
    ],
)
def test_a_module_of_our_own_that_is_malformed_is_refused(tmp_path, part, value, said):
    model, _ = tiny_llama(tmp_path, layers=1)
    out = tmp_path / "out"
    program.main(["quantize", str(model), "--to", "sparse24", "--out", str(out)], standalone_mode=False)
    tensors = load_file(out / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{part}"
    if isinstance(value, int):
        tensors[name].fill_(value)
    elif value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, out / "model.safetensors")
    message = refusal(out)
    assert said in message and "model.layers.0.self_attn.q_proj" in message


def test_columns_past_the_last_are_refused(tmp_path):
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    names = {"weight_values": values, "weight_shape": torch.tensor([1, 6])}
    for indices, said in ((0b0100_0100, None), (0b1100_0100, "past the last")):
        tensors = {f"{NAME}.{part}": tensor for part, tensor in names.items()}
        tensors[f"{NAME}.weight_indices"] = torch.tensor([[indices]], dtype=torch.uint8)
        path = folder_of(tmp_path, tensors, {"quant_method": "intarsia", "format": "sparse24", "version": 1})
        if said is None:
            assert read(open_folder(path).tensors[f"{NAME}.weight"]).tolist() == [[1, 2, 0, 0, 3, 4]]
        else:
            assert said in refusal(path)
