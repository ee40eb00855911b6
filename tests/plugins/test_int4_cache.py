"""What the int4 quantizer keeps on disk: the same weights at the next start, and never those of other options."""

import pytest
import torch

from intarsia.errors import CheckpointError
from intarsia.protocols import PartContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.quantizing.remembered import RememberedWeights
from intarsia.types import dense
from intarsia_int4 import gptq, provide_quantizers, quantizer, rounding
from intarsia_int4.options import Int4Options

NAME, SHAPE = "layers.0.out.weight", (40, 96)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    return tmp_path / "weights"


@pytest.fixture
def calibration(tmp_path):
    return saved(tmp_path / "calibration", 0)


def saved(path, seed):
    x = drawn(200, 96, seed=seed) * (1 + drawn(96, seed=seed + 9).square() * 10)
    Calibration({NAME[:-7]: InputStatistics(x.abs().amax(0), x.square().mean(0), x.bfloat16())}, "m", 9).save(path)
    return str(path)


def quantized(weight=None, **options):
    [provider] = provide_quantizers()
    part = provider.build(PartContext(spec=None, options=Int4Options(**options)))
    return part.quantize(NAME, dense(drawn(*SHAPE) if weight is None else weight))


def kept(folder):
    return len(list(folder.glob("*.safetensors")))


@pytest.mark.parametrize("options", [{}, {"gptq": True}, {"zero_points": True}, {"awq": False}], ids=str)
def test_the_next_start_finds_the_same_weight_and_computes_none(folder, calibration, options, monkeypatch):
    plain = quantized(calibration=calibration, cache=False, **options)
    assert not folder.exists()
    first = quantized(calibration=calibration, **options)

    def fails(*_, **__):
        raise AssertionError("it is there")

    monkeypatch.setattr(rounding, "quantize", fails)
    monkeypatch.setattr(gptq, "quantize", fails)
    monkeypatch.setattr(quantizer, "scale_columns", fails)
    again = quantized(calibration=calibration, **options)
    for weight in (first, again):
        assert weight.format == plain.format and weight.tensors.keys() == plain.tensors.keys()
        assert all(torch.equal(weight.tensors[key], plain.tensors[key]) for key in plain.tensors)


def test_a_search_without_calibration_is_kept_and_rounding_to_nearest_is_not(folder):
    quantized()
    assert not folder.exists(), "it takes as long as reading a file does"
    quantized(clip=True)
    assert kept(folder) == 1


def test_whatever_changes_the_weight_has_a_file_of_its_own(folder, calibration, tmp_path):
    other = saved(tmp_path / "other", 1)
    changed = drawn(*SHAPE)
    changed[3, 5] += 1e-3
    runs = [
        {"calibration": calibration},
        {"calibration": other},
        {"calibration": calibration, "awq": False},
        {"calibration": calibration, "clip": False},
        {"calibration": calibration, "gptq": True},
        {"calibration": calibration, "group": 32},
        {"calibration": calibration, "zero_points": True},
        {"calibration": calibration, "activations": "float"},
        {"calibration": calibration, "weight": changed},
        {"calibration": calibration, "weight": drawn(*SHAPE).bfloat16()},
        {"clip": True},
    ]
    for number, run in enumerate(runs, 1):
        quantized(**run)
        assert kept(folder) == number, run
    for run in runs:
        quantized(**run)
    assert kept(folder) == len(runs)


def test_which_layers_are_taken_and_where_the_calibration_lies_change_nothing(folder, calibration, tmp_path):
    quantized(calibration=calibration)
    quantized(calibration=saved(tmp_path / "moved", 0), include=("layers.*",), head=True)
    assert kept(folder) == 1


def test_code_that_changes_finds_nothing_of_before(folder, monkeypatch):
    quantized(clip=True)
    monkeypatch.setattr(quantizer, "code_digest", lambda *_: "other")
    quantized(clip=True)
    assert kept(folder) == 2


def test_a_weight_that_cannot_be_quantized_is_refused_each_time(folder):
    for _ in range(2):
        with pytest.raises(CheckpointError, match=NAME):
            quantized(torch.full(SHAPE, torch.nan), clip=True)
    assert not folder.exists()


def test_a_part_that_is_made_by_hand_keeps_nothing():
    assert quantizer.Int4Quantizer(Int4Options(clip=True), None).remembered is None
    assert RememberedWeights().most_bytes == 8 << 30
