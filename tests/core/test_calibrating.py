"""Calibration: the statistics are those of the inputs that transformers' own layers are given."""

import pytest
import torch

from engines import CACHE
from families import CASES, saved
from intarsia.calibrating import Inputs, calibrate, unseen
from intarsia.config import load_config
from intarsia.errors import ConfigError, ExecutionError
from models import tiny_llama, tiny_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, twice: " * 6
BY_NAME = {case.name: case for case in CASES}


def calibrated(path, text=TEXT, *, tokens=1000, window=64, progress=lambda *_: None, **sections):
    config = {"model": str(path), "engine": {"dtype": "float32", "threads": 1}, "cache": CACHE} | sections
    return calibrate(load_config(config), text, tokens=tokens, window=window, progress=progress)


def spied(model, names, windows, dtype=torch.float64):
    """Run windows of ids; return the inputs (T, C) of the modules of these names, in float64."""
    seen = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen[name].append(args[0].reshape(-1, args[0].shape[-1]))
        )
        for name in names
    ]
    model.to(dtype)
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([window]))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(inputs).double() for name, inputs in seen.items()}


def windows_of(text, size):
    """Cut as little as there is into equal parts of a size at most."""
    ids = tiny_tokenizer()(text).input_ids
    number = -(-len(ids) // size)
    return [ids[len(ids) * i // number : len(ids) * (i + 1) // number] for i in range(number)]


def assert_of(found, inputs_TC):
    torch.testing.assert_close(found.largest.double(), inputs_TC.abs().amax(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean_square.double(), inputs_TC.square().mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.sample.double(), inputs_TC, rtol=2**-7, atol=1e-4)  # fewer than 512: all of them


@pytest.mark.parametrize("tie", [False, True])
def test_statistics_equal_those_of_transformers_inputs_in_float64(tmp_path, tie):
    path, model = tiny_llama(tmp_path, layers=2, tie=tie, attention_bias=True)
    calibration = calibrated(path)
    linears = {"head": "lm_head"}
    for i in range(2):
        prefix = f"model.layers.{i}"
        linears |= {
            f"layers.{i}.qkv": f"{prefix}.self_attn.q_proj",
            f"layers.{i}.out": f"{prefix}.self_attn.o_proj",
            f"layers.{i}.gate_up": f"{prefix}.mlp.up_proj",
            f"layers.{i}.down": f"{prefix}.mlp.down_proj",
        }
    inputs = spied(model, linears.values(), windows_of(TEXT, 64))
    assert calibration.inputs.keys() == linears.keys()
    assert calibration.num_tokens == len(TEXT) == 312
    assert calibration.model == path.name
    for name, module in linears.items():
        assert_of(calibration.inputs[name], inputs[module])


@pytest.mark.parametrize("name", ["gpt2", "phi", "gemma2", "olmo2", "qwen3 with heads wider than the model", "granite"])
def test_every_family_s_linears_are_seen(tmp_path, name):
    case = BY_NAME[name]
    model = saved(case, tmp_path)
    calibration = calibrated(tmp_path)
    up = "up" if name in ("gpt2", "phi") else "gate_up"
    layers = range(case.config.num_hidden_layers)
    expected = {f"layers.{i}.{linear}" for i in layers for linear in ("qkv", "out", up, "down")} | {"head"}
    assert calibration.inputs.keys() == expected
    assert unseen(calibration) == []
    (head,) = spied(model, ["lm_head"], windows_of(TEXT, 64)).values()
    assert_of(calibration.inputs["head"], head)


def test_experts_see_their_own_tokens_and_those_without_any_are_zeros(tmp_path):
    model = saved(BY_NAME["mixtral"], tmp_path)
    text = "ab"
    calibration = calibrated(tmp_path, text)
    given = spied(model, [f"model.layers.{i}.mlp" for i in range(4)], windows_of(text, 64), torch.float32)
    idle = []
    for i in range(4):
        inputs_TE = given[f"model.layers.{i}.mlp"]
        router = model.get_submodule(f"model.layers.{i}.mlp.gate").weight.double()
        chosen_TN = (inputs_TE @ router.T).topk(2).indices
        assert_of(calibration.inputs[f"layers.{i}.router"], inputs_TE)
        for expert in range(6):
            mine = inputs_TE[(chosen_TN == expert).any(1)]
            found = calibration.inputs[f"layers.{i}.experts.{expert}.gate_up"]
            if len(mine):
                assert_of(found, mine)
            else:
                idle += [f"layers.{i}.experts.{expert}.{linear}" for linear in ("gate_up", "down")]
                assert not found.largest.any()
                assert not found.mean_square.any()
                assert found.sample.shape == (0, 64)
    assert idle
    assert unseen(calibration) == idle


def test_the_model_runs_dense_whatever_the_config_asks_for(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    plain, quantized = calibrated(path), calibrated(path, quantizer="int8", runner="scripted")
    for name, found in plain.inputs.items():
        assert torch.equal(found.largest, quantized.inputs[name].largest)


def test_few_tokens_are_spread_over_the_text(tmp_path):
    """Letters that stand at one place each tell where the sequences were taken."""
    path, model = tiny_llama(tmp_path, layers=1, hidden=32, ffn=32)
    text = "".join(letter * 40 for letter in "abcdefgh")
    calibration = calibrated(path, text, tokens=40, window=10)
    assert calibration.num_tokens == 40
    (inputs,) = spied(model, ["lm_head"], [tiny_tokenizer()(letter * 10).input_ids for letter in "aceg"]).values()
    assert_of(calibration.inputs["head"], inputs)


def test_progress_ends_at_the_number_of_tokens(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    told = []
    calibrated(path, tokens=100, window=30, progress=lambda *what: told.append(what))
    done = [what for what in told if what[0] == "calibrating"]
    assert done == [("calibrating", 25 * (i + 1), 100) for i in range(4)]


def test_sums_of_two_pieces_by_hand():
    inputs = Inputs.none(2, torch.device("cpu"))
    inputs.add(torch.tensor([[1.0, -3.0], [2.0, 0.0]]))
    inputs.add(torch.tensor([[-4.0, 0.0]]))
    found = inputs.statistics("x")
    assert found.largest.tolist() == [4, 3]
    assert found.mean_square.tolist() == [7, 3]
    assert found.sample.tolist() == [[1, -3], [2, 0], [-4, 0]]


def test_a_sample_of_many_tokens_is_512_in_order_and_from_everywhere():
    numbers = torch.arange(100 * 128, dtype=torch.float32)
    inputs = Inputs.none(2, torch.device("cpu"))
    for piece in numbers.split(100):
        inputs.add(torch.stack((piece // 128, piece % 128), dim=1))  # whole numbers that bfloat16 holds
    found = inputs.statistics("x").sample.double()
    places = found[:, 0] * 128 + found[:, 1]
    assert len(places) == 512
    assert places.diff().min() > 0
    tenths = torch.histc(places, bins=10, min=0, max=len(numbers))
    assert tenths.min() > 25 and tenths.max() < 80  # 51 each, give or take four deviations


def test_the_statistics_do_not_depend_on_the_pieces():
    x_TC = torch.randn(2000, 3)
    found = []
    for sizes in ([2000], [300, 400, 1, 1299], [7] * 285 + [5]):
        inputs = Inputs.none(3, torch.device("cpu"))
        for piece in x_TC.split(sizes):
            inputs.add(piece)
        found.append(inputs.statistics("x"))
    for other in found[1:]:
        assert torch.equal(other.largest, found[0].largest)
        assert torch.equal(other.sample, found[0].sample)
        torch.testing.assert_close(other.mean_square, found[0].mean_square)


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_inputs_that_are_not_finite_are_refused_by_the_linears_name(number):
    inputs = Inputs.none(2, torch.device("cpu"))
    inputs.add(torch.tensor([[1.0, float(number)]]))
    with pytest.raises(ExecutionError, match=r"inputs of layers.3.down are not finite"):
        inputs.statistics("layers.3.down")


def test_a_text_or_window_that_cannot_be_run_is_refused(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1, max_len=32)
    with pytest.raises(ConfigError, match=r"window: 33 is more than the 32 tokens of engine.max_model_len"):
        calibrated(path, window=33)
    with pytest.raises(ConfigError, match="text: it is empty"):
        calibrated(path, "", window=32)
    mute, _ = tiny_llama(tmp_path, layers=1, vocab=64)
    with pytest.raises(ConfigError, match="no tokenizer"):
        calibrated(mute)
