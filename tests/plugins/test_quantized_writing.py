"""`intarsia quantize`: folders that transformers loads and that are read back to the same bits, and failures that leave
nothing behind."""

import json

import click
import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

import intarsia_quantized.folder_writer as folder_writer
from engines import CACHE
from intarsia import Engine
from intarsia.cli import run
from intarsia.cli.program import program
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import CheckpointError, ConfigError, IntarsiaError
from intarsia.hookspecs import hookimpl
from intarsia.plugins import Registry
from intarsia.quantizing.integers import IntegerFormat, pack_nibbles
from intarsia.testing import prompt_logits
from intarsia.types import AttentionSpec, LayerSpec, MlpSpec, MoeSpec, Provider, StoredWeight, Weight, dense
from intarsia_quantized.exporting import write
from intarsia_quantized.folding import fold
from models import edit_json, tiny_llama
from quantized import open_folder

PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]


def quantize(*arguments):
    program.main(["quantize", *map(str, arguments)], standalone_mode=False)


def parts_of(model, *, plugins=(), **sections):
    config = {"model": {"use": str(model), "weights": "dense"}, "engine": {"dtype": "float32"}, "cache": CACHE}
    loaded = load_config(config | {"kernels": "torch", "runner": "eager", "attention": "sdpa"} | sections)
    return compose(loaded, Registry.discover(loaded.engine.plugins, plugins))


def logits_of(model, *, plugins=(), weights="dense", **sections):
    """Our logits, with products in floats."""
    config = {"model": {"use": str(model), "weights": weights}, "engine": {"dtype": "float32"}, "cache": CACHE}
    config |= {"kernels": "torch", "runner": "eager", "attention": "sdpa"} | sections
    with Engine.from_config(config, plugins=plugins) as engine:
        return prompt_logits(engine, PROMPT)


@torch.no_grad()
def logits_of_transformers(path, *, rounds_activations=False, dequantize=False):
    """Logits of transformers, which loads packed zero points as floats alone (5.24 with compressed-tensors 0.20)."""
    also = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager", **also).eval()
    if dequantize:
        return model(torch.tensor([PROMPT])).logits[0]
    schemes = {id(s): s for m in model.modules() if (s := getattr(m, "quantization_scheme", None)) is not None}
    assert schemes, "transformers takes it for a quantized model"
    if not rounds_activations:
        for scheme in schemes.values():
            scheme.input_activations = None
    return model(torch.tensor([PROMPT])).logits[0]


def expected_weights(parts):
    """What the quantizers make of each canonical weight, in float32."""
    made = {}
    for name, source in parts.weight_map.tensors.items():
        takers = [quantizer for quantizer in parts.quantizers if quantizer.accepts(name, source.shape)]
        if len(source.shape) == 2 and takers:
            whole = torch.empty(source.shape)
            start = 0
            for stored, shape in zip(source.names, source.shapes, strict=True):
                parts.checkpoint.tensors[stored].read(whole[start : start + shape[0]])
                start += shape[0]
            made[name] = source, takers[0].quantize(name, dense(whole))
    return made


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("int8", {}),
        ("int8", {"head": False, "group": 32}),
        ("int8", {"activations": "float"}),
        ("int4", {"group": 32}),
        ("int4", {"group": 64, "zero_points": True, "head": True}),
        ("int4", {"group": 32, "exclude": ["layers.0.*", "*.down.weight"]}),
    ],
)
def test_a_written_folder_is_read_back_to_the_same_bits_and_formats(tmp_path, key, options):
    model, _ = tiny_llama(tmp_path, layers=2)
    overrides = [f"-oquantizer.{name}={json.dumps(value)}" for name, value in options.items()]
    quantize(model, "--to", key, "--out", tmp_path / "out", *overrides)
    checkpoint = open_folder(tmp_path / "out")
    group = {"group": 0} if key == "int8" else {}
    expected = expected_weights(parts_of(model, quantizer={"use": key, **group, **options}))
    assert expected
    seen = set()
    for source, weight in expected.values():
        start = 0
        for name, shape in zip(source.names, source.shapes, strict=True):
            stored = checkpoint.tensors[name]
            assert isinstance(stored, StoredWeight) and stored.weight_format == weight.format
            part, found = weight.rows(slice(start, start + shape[0])), stored.read_weight()
            assert found.tensors.keys() == part.tensors.keys()
            for part_name, tensor in part.tensors.items():
                assert tensor.dtype == found.tensors[part_name].dtype
                assert torch.equal(tensor, found.tensors[part_name]), (name, part_name)
            start += shape[0]
            seen.add(name)
    plain = load_file(model / "model.safetensors")
    assert checkpoint.tensors.keys() == plain.keys()
    for name in plain.keys() - seen:
        out = torch.empty(plain[name].shape)
        checkpoint.tensors[name].read(out)
        assert torch.equal(out, plain[name].bfloat16().float()), name


@pytest.mark.parametrize("kept", ["auto", "dense"])
def test_a_written_folder_runs_and_equals_the_model_quantized_as_it_loads(tmp_path, kept):
    model, _ = tiny_llama(tmp_path, layers=2)
    quantize(model, "--to", "int4", "--out", tmp_path / "out", "--dtype", "float32", "-o", "quantizer.group=32")
    expected = logits_of(model, quantizer={"use": "int4", "group": 32})
    found = logits_of(tmp_path / "out", weights=kept)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "options", "tie"),
    [
        ("int8", {}, False),
        ("int8", {}, True),  # the head gets a weight of its own
        ("int4", {"group": 32}, True),
        ("int4", {"group": 64, "zero_points": True, "exclude": ["layers.1.*"]}, False),
    ],
)
def test_transformers_gives_the_logits_of_our_dequantized_model(tmp_path, key, options, tie):
    model, _ = tiny_llama(tmp_path, layers=2, tie=tie, attention_bias=True, mlp_bias=True)
    out = tmp_path / "out"
    overrides = [f"-oquantizer.{name}={json.dumps(value)}" for name, value in options.items()]
    quantize(model, "--to", key, "--out", out, "--dtype", "float32", *overrides)
    group = {"group": 0} if key == "int8" else {}
    expected = logits_of(model, quantizer={"use": key, **group, **options})
    with_zeros = options.get("zero_points", False)
    theirs = logits_of_transformers(out, dequantize=with_zeros)
    # It dequantizes in the dtype of the scales, bfloat16, where it does so as it loads.
    torch.testing.assert_close(theirs, expected, rtol=0, atol=0.05 if with_zeros else 2e-4)
    assert not torch.allclose(logits_of(model), expected, atol=1e-2), "quantizing changes something"
    torch.testing.assert_close(logits_of(out), expected, rtol=0, atol=2e-5)
    assert AutoTokenizer.from_pretrained(out).encode("Hello") == AutoTokenizer.from_pretrained(model).encode("Hello")


def test_int8_folders_ask_transformers_to_round_activations_a_token(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=1)
    quantize(model, "--to", "int8", "--out", tmp_path / "out", "--dtype", "float32")
    rounded = logits_of_transformers(tmp_path / "out", rounds_activations=True)
    floats = logits_of_transformers(tmp_path / "out")
    assert 0 < (rounded - floats).abs().max() < 0.2 * floats.abs().max()


def mixing_plugin(pick, **layouts):
    """A plugin with a quantizer for each kind of linear, whose format is given; `pick` makes its weights."""

    @frozen
    class OfKind:
        kind: str
        format: str

        def accepts(self, name, shape):
            return f".{self.kind}." in name

        def num_bytes(self, name, shape):
            return shape[0] * shape[1]

        def quantize(self, name, weight):
            return pick(name, weight)

    class Plugin:
        @hookimpl
        def provide_quantizers(self):
            for kind, layout in layouts.items():
                part = OfKind(kind, layout.name)
                yield Provider(key=f"test_{kind}", summary="", build=lambda _, part=part: part)

    return {"plugins": [Plugin()], "quantizer": [f"test_{kind}" for kind in layouts]}


def rounded(weight, layout, input_scale=None):
    """Round to nearest in any format, plainly."""
    matrix = weight.dequantize() / (1 if input_scale is None else input_scale)
    outs, ins = matrix.shape
    groups = matrix.view(outs, -1, layout.group or ins)
    top = 127 if layout.bits == 8 else 7
    scale = groups.abs().amax(-1) / top
    scale = scale if layout.group is None else scale.bfloat16().float()
    q = (groups / scale[..., None]).round().clamp(-top, top).view(outs, ins)
    tensors = {"scale": scale[:, 0].contiguous() if layout.group is None else scale.bfloat16()}
    tensors["weight"] = q.to(torch.int8) if layout.bits == 8 else pack_nibbles(q + 8)
    if input_scale is not None:
        tensors["input_scale"] = input_scale
    return Weight(layout, tensors, (outs, ins))


def test_weights_of_several_formats_share_a_folder(tmp_path):
    layouts = {
        "qkv": IntegerFormat(8),
        "out": IntegerFormat(8, activations="float"),
        "gate_up": IntegerFormat(4, 32),
        "down": IntegerFormat(8, 64, activations="float"),
    }

    def pick(name, weight):
        return rounded(weight, layouts[name.split(".")[2]])

    model, _ = tiny_llama(tmp_path, layers=2)
    mixed = mixing_plugin(pick, **layouts)
    parts = parts_of(model, **mixed)
    written = write(parts, tmp_path / "out", dtype=torch.float32, force=False)
    assert written.formats == {"int8": 6, "int8_a16": 2, "int4_g32": 4, "int8_g64_a16": 2}
    found = {
        name: tensor.weight_format.name
        for name, tensor in open_folder(tmp_path / "out").tensors.items()
        if isinstance(tensor, StoredWeight)
    }
    for name, layout in (("q", "qkv"), ("o", "out"), ("down", "down"), ("up", "gate_up")):
        assert {f for key, f in found.items() if f".{name}_proj" in key} == {layouts[layout].name}
    expected = logits_of(model, **mixed)
    torch.testing.assert_close(logits_of_transformers(tmp_path / "out"), expected, rtol=0, atol=2e-4)


# --- input scales -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [IntegerFormat(8, activations="float"), IntegerFormat(4, 32)])
def test_input_scales_are_folded_into_norms_and_rows(tmp_path, layout):
    def scales(name, columns):
        generator = torch.Generator().manual_seed(columns)
        found = torch.rand(columns, generator=generator) * 3 + 0.2
        if ".out." in name:  # 4 heads share 2 values' heads, each of 16 dimensions
            found = found[:32].view(2, 1, 16).expand(2, 2, 16).flatten()
        return found.contiguous()

    def pick(name, weight):
        return rounded(weight, layout, scales(name, weight.shape[1]))

    model, _ = tiny_llama(tmp_path, layers=2, attention_bias=True, mlp_bias=True)
    mixed = mixing_plugin(pick, **dict.fromkeys(("qkv", "out", "gate_up", "down"), layout))
    write(parts_of(model, **mixed), tmp_path / "out", dtype=torch.float32, force=False)
    expected = logits_of(model, **mixed)
    torch.testing.assert_close(logits_of_transformers(tmp_path / "out"), expected, rtol=0, atol=5e-4)
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("input_scale")]


HEADS = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=2, scale=1.0, rope=None)
LAYER = LayerSpec(attention=HEADS, mlp=MlpSpec(ffn_dim=6, activation="silu"))


def layer_values(name, columns, scale=None):
    weight = rounded(dense(torch.randn(8, columns)), IntegerFormat(8))
    scale = torch.arange(1.0, columns + 1) if scale is None else scale
    weight = evolve(weight, tensors={**weight.tensors, "input_scale": scale})
    return {f"layers.0.{name}.weight": weight, "layers.0.qkv.weight": dense(torch.randn(16, 8))}


@pytest.mark.parametrize(
    ("name", "columns", "layer", "why"),
    [
        ("out", 8, LAYER, "heads that share values"),
        ("down", 6, evolve(LAYER, mlp=MlpSpec(ffn_dim=6, activation="gelu_tanh", gated=False)), "activation function"),
        ("gate_up", 8, evolve(LAYER, parallel=True), "no norm stands before it alone"),
        ("gate_up", 8, evolve(LAYER, norms="post"), "no norm stands before it alone"),
        (
            "experts.1.down",
            6,
            evolve(LAYER, mlp=MoeSpec(num_experts=2, top_k=1, ffn_dim=6, activation="silu")),
            "experts",
        ),
    ],
)
def test_input_scales_that_have_nowhere_to_go_are_refused_by_name(name, columns, layer, why):
    with pytest.raises(CheckpointError, match=why) as caught:
        fold(layer_values(name, columns), "layers.0.", layer, {})
    assert f"layers.0.{name}.weight" in str(caught.value) and "quantizer.exclude" in str(caught.value)


def test_a_norm_that_is_stored_less_1_is_scaled_with_it():
    values = layer_values("up", 8) | {"layers.0.mlp_norm.weight": torch.full((8,), 0.5)}
    fold(values, "layers.0.", LAYER, {"layers.0.mlp_norm.weight": 1.0})
    torch.testing.assert_close(values["layers.0.mlp_norm.weight"] + 1, 1.5 * torch.arange(1.0, 9.0))


# --- refusals, and what a failure leaves ------------------------------------------------------------------------------


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


def test_nothing_is_left_of_a_run_that_fails(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=2)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, model / "model.safetensors")
    before = left(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.down\.weight"):
        quantize(model, "--to", "int8", "--out", tmp_path / "out")
    assert left(tmp_path) == before
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(CheckpointError):
        quantize(model, "--to", "int8", "--out", tmp_path / "out", "--force")
    assert left(tmp_path / "out") == ["config.json"]
    assert (tmp_path / "out" / "config.json").read_text() == "mine"


def test_a_folder_that_holds_files_is_written_to_with_force_alone(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "model-00001-of-00002.safetensors").write_text("stale")
    (out / "model.safetensors.index.json").write_text("stale")
    with pytest.raises(ConfigError, match="--force"):
        quantize(model, "--to", "int8", "--out", out)
    assert (out / "model.safetensors.index.json").read_text() == "stale"
    quantize(model, "--to", "int8", "--out", out, "--force")
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "model.safetensors.index.json").exists()
    assert open_folder(out).tensors
    with pytest.raises(ConfigError, match="is a file"):
        quantize(model, "--to", "int8", "--out", out / "notes.txt", "--force")
    with pytest.raises(ConfigError, match="read from"):
        quantize(model, "--to", "int8", "--out", model, "--force")


def test_many_bytes_are_written_in_shards_with_an_index(tmp_path, monkeypatch):
    model, _ = tiny_llama(tmp_path, layers=2)
    monkeypatch.setattr(folder_writer, "SHARD_BYTES", 30_000)
    monkeypatch.setattr(folder_writer.FolderWriter.__init__, "__defaults__", (30_000,))
    out = tmp_path / "out"
    quantize(model, "--to", "int8", "--out", out, "--dtype", "float32")
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 2 and shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    assert all(shard.stat().st_size < 80_000 for shard in shards)
    assert {shard.stat().st_mode for shard in shards} == {(out / "config.json").stat().st_mode}
    torch.testing.assert_close(
        logits_of(out), logits_of(model, quantizer={"use": "int8", "group": 0}), rtol=0, atol=1e-5
    )
    assert json.loads((out / "model.safetensors.index.json").read_text())["metadata"]["total_size"] > 100_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "int5"], "int5"),
        (["--to", "none"], "none"),
        (["--to", "int4", "-o", "quantizer.group=48"], "48"),
        (["--to", "int4", "-o", "quantizer.group=128"], "layers.0.self_attn.q_proj: its 64 columns"),
        (["--to", "int8", "-o", "quantizer.embed=true"], "embed.weight"),
        (["--to", "int8", "-o", 'quantizer.exclude=["*"]'], "no weight is quantized"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, arguments, said):
    model, _ = tiny_llama(tmp_path, layers=1)
    with pytest.raises(IntarsiaError) as caught:
        quantize(model, "--out", tmp_path / "out", *arguments)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_two_sources_of_calibration_are_a_mistake(tmp_path):
    with pytest.raises(click.UsageError, match="both given"):
        quantize("smollm2", "--to", "int8", "--out", tmp_path / "out", "--calibration", "a", "--calibrate", "b")


def test_formats_with_minima_have_no_place_in_a_folder(tmp_path):
    def pick(name, weight):
        made = rounded(weight, IntegerFormat(8, 32))
        tensors = {**made.tensors, "min": torch.zeros_like(made.tensors["scale"])}
        return Weight(IntegerFormat(8, 32, "min"), tensors, made.shape)

    model, _ = tiny_llama(tmp_path, layers=1)
    parts = parts_of(model, **mixing_plugin(pick, qkv=IntegerFormat(8, 32, "min")))
    with pytest.raises(CheckpointError, match=r"q_proj: compressed-tensors has no format for weights in int8_g32_min"):
        write(parts, tmp_path / "out", dtype=torch.float32, force=False)


def test_a_quantized_folder_is_quantized_anew(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=1)
    quantize(model, "--to", "int8", "--out", tmp_path / "int8", "--dtype", "float32")
    quantize(tmp_path / "int8", "--to", "int4", "--out", tmp_path / "int4", "-o", "quantizer.group=32")
    config = json.loads((tmp_path / "int4" / "config.json").read_text())
    assert config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    expected = logits_of(tmp_path / "int8", quantizer={"use": "int4", "group": 32, "head": False})
    torch.testing.assert_close(logits_of(tmp_path / "int4"), expected, rtol=0, atol=0.3)


def test_a_float16_model_keeps_its_dtype(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=1, dtype=torch.float16)
    edit_json(model / "config.json", torch_dtype="float16")
    quantize(model, "--to", "int8", "--out", tmp_path / "out")
    assert open_folder(tmp_path / "out").dtype == "float16"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == torch.float16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_of_a_gguf_file_becomes_a_folder_that_transformers_loads(tmp_path):
    quantize("smollm2", "--to", "int4", "--out", tmp_path / "out", "--dtype", "float32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    chat = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids[:3] == [1, 9690, 198] and len(ids) == 31, "its chat template is there"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    theirs = model(torch.tensor([ids])).logits[0]
    config = {"model": {"use": "smollm2"}, "quantizer": "int4", "kernels": "torch", "runner": "eager"}
    with Engine.from_config(config | {"engine": {"dtype": "float32", "max_model_len": 256}}) as engine:
        ours = prompt_logits(engine, ids)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=5e-3)


def test_transformers_reads_zero_points_as_they_are_written(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=1)
    out = tmp_path / "out"
    quantize(model, "--to", "int4", "--out", out, "-o", "quantizer.group=32", "-o", "quantizer.zero_points=true")
    asked = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=asked).state_dict()
    names = [name for name, tensor in open_folder(out).tensors.items() if isinstance(tensor, StoredWeight)]
    assert len(names) == 7
    for name in names:
        ours = open_folder(out).tensors[name].read_weight().dequantize()
        assert torch.equal(theirs[name], ours.bfloat16().float()), name


@pytest.mark.parametrize(
    ("key", "options"),
    [("int8", ["quantizer.smooth=0.5", 'quantizer.activations="float"']), ("int4", ["quantizer.group=32"])],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_methods_that_need_text_are_calibrated_on_it(tmp_path, key, options, kv_heads, capfd):
    model, _ = tiny_llama(tmp_path, layers=2, kv_heads=kv_heads)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog takes no notice of it. " * 40)
    out = tmp_path / "out"
    overrides = [item for option in options for item in ("-o", option)]
    asked = ["--to", key, "--out", out, "--dtype", "float32", "--calibrate", text, *overrides]
    assert run(["quantize", str(model), *map(str, asked)]) == 0, capfd.readouterr().err
    saved = tmp_path / "saved.safetensors"
    assert run(["calibrate", str(model), "--text", str(text), "--out", str(saved)]) == 0
    values = dict(option.removeprefix("quantizer.").split("=") for option in options)
    asked = {name: json.loads(value) for name, value in values.items()} | {"calibration": str(saved)}
    group = {"group": 0} if key == "int8" else {}
    quantizer = {"use": key, **group, **asked}
    scaled = [weight for _, weight in expected_weights(parts_of(model, quantizer=quantizer)).values()]
    assert any("input_scale" in weight.tensors for weight in scaled), "there is something to fold"
    expected, found = logits_of(model, quantizer=quantizer), logits_of(out)
    torch.testing.assert_close(logits_of_transformers(out), found, rtol=0, atol=2e-3)
    if kv_heads == 4:
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    else:  # heads that share values share their scales, of which the folder's weights are rounded anew
        exact = logits_of(model)
        assert (found - exact).norm() < 1.5 * (expected - exact).norm()


@pytest.mark.parametrize(
    ("key", "options"),
    [("int4", {"group": 32, "gptq": True}), ("sparse24", {"method": "wanda"})],
    ids=["gptq", "wanda"],
)
def test_options_that_only_a_calibration_gives_sense_write_what_they_would_run(tmp_path, key, options, capfd):
    model, _ = tiny_llama(tmp_path, layers=2, kv_heads=4)
    saved, out = tmp_path / "saved.safetensors", tmp_path / "out"
    assert run(["calibrate", str(model), "--tokens", "600", "--out", str(saved)]) == 0
    overrides = [item for name, value in options.items() for item in ("-o", f"quantizer.{name}={json.dumps(value)}")]
    asked = ["--to", key, "--out", out, "--dtype", "float32", "--calibration", saved, *overrides]
    assert run(["quantize", str(model), *map(str, asked)]) == 0, capfd.readouterr().err
    expected = logits_of(model, quantizer={"use": key, "calibration": str(saved), **options})
    torch.testing.assert_close(logits_of(out), expected, rtol=0, atol=2e-3)
