"""Calibration files: what is saved is read back, and what is none is refused in the name of the option."""

import pytest
import torch
from safetensors.torch import save_file

from intarsia.errors import ConfigError
from intarsia.quantizing.calibration import KIND, Calibration, InputStatistics

WHERE = "quantizer.calibration"


def statistics(columns=3, rows=2):
    return InputStatistics(torch.rand(columns), torch.rand(columns), torch.randn(rows, columns).bfloat16())


def contents(**changed):
    found = statistics()
    tensors = {f"layers.0.qkv.{key}": getattr(found, key) for key in ("largest", "mean_square", "sample")}
    return {f"layers.0.qkv.{key}": value for key, value in changed.items()} | {
        name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in changed
    }


def write(path, tensors, **metadata):
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {"format": KIND, "model": "m", "tokens": "7"} | metadata)
    return path


def test_what_is_saved_is_read_back_bit_for_bit(tmp_path):
    saved = Calibration({"layers.0.qkv": statistics(), "head": statistics(4, 0)}, "a model", 12)
    saved.save(tmp_path / "c")
    read = Calibration.open(tmp_path / "c", WHERE)
    assert (read.model, read.num_tokens, read.inputs.keys()) == ("a model", 12, saved.inputs.keys())
    for name, found in saved.inputs.items():
        for key in ("largest", "mean_square", "sample"):
            before, after = getattr(found, key), getattr(read.inputs[name], key)
            assert before.dtype == after.dtype
            assert torch.equal(before, after)


def test_a_saved_file_has_the_mode_of_other_files_and_nothing_lies_beside_it(tmp_path):
    (tmp_path / "other").touch()
    Calibration({"head": statistics()}, "m", 1).save(tmp_path / "c")
    assert (tmp_path / "c").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "other"]


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path):
    Calibration({"head": statistics()}, "first", 1).save(tmp_path / "c")
    same = torch.zeros(4)
    shared = InputStatistics(same[:3], same[:3], same[:3].unsqueeze(0))  # safetensors refuses shared memory
    with pytest.raises(RuntimeError):
        Calibration({"head": shared}, "second", 1).save(tmp_path / "c")
    assert [file.name for file in tmp_path.iterdir()] == ["c"]
    assert Calibration.open(tmp_path / "c", WHERE).model == "first"


def test_statistics_are_found_with_and_without_the_suffix_of_a_weight():
    calibration = Calibration({"layers.0.qkv": statistics(3)}, "m", 1)
    assert calibration.of("layers.0.qkv.weight", 3, WHERE) is calibration.of("layers.0.qkv", 3, WHERE)


def test_another_model_is_refused_by_the_linears_name():
    calibration = Calibration({"layers.0.qkv": statistics(3)}, "other", 1)
    with pytest.raises(ConfigError, match=r"quantizer.calibration: .*'other' has nothing of 'head.weight'"):
        calibration.of("head.weight", 3, WHERE)
    with pytest.raises(ConfigError, match=r"'layers.0.qkv.weight' has 4 inputs, and 3 in the calibration of 'other'"):
        calibration.of("layers.0.qkv.weight", 4, WHERE)


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        (contents(), {"format": "pt"}, "is no calibration"),
        (contents(sample=None), {}, "lacks the tensor 'layers.0.qkv.sample'"),
        (contents(largest=torch.rand(4)), {}, "malformed"),
        (contents(mean_square=torch.rand(1, 3)), {}, "malformed"),
        (contents(sample=torch.rand(3)), {}, "malformed"),
        (contents(largest=torch.tensor(1.0)), {}, "malformed"),
        (contents(largest=torch.tensor([1, 2, 3])), {}, "malformed"),
        (contents(mean_square=torch.tensor([1.0, float("nan"), 1.0])), {}, "malformed"),
        (contents(sample=torch.tensor([[1.0, float("inf"), 1.0]])), {}, "malformed"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(tmp_path, tensors, metadata, message):
    path = write(tmp_path / "c", tensors, **metadata)
    with pytest.raises(ConfigError, match=message) as refusal:
        Calibration.open(path, WHERE)
    assert refusal.value.field == WHERE
    assert str(path) in str(refusal.value)


def test_a_file_that_is_missing_cut_or_no_safetensors_is_refused(tmp_path):
    whole = write(tmp_path / "c", contents()).read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-1])
    (tmp_path / "text").write_text("no safetensors")
    for name in ("cut", "text", "missing"):
        with pytest.raises(ConfigError, match=f"{WHERE}: .* cannot be read"):
            Calibration.open(tmp_path / name, WHERE)
