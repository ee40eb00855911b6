"""`intarsia eval perplexity` and `intarsia calibrate`: what they print and write, and what they refuse."""

import json

import pytest
from safetensors import safe_open

from engines import CACHE
from intarsia.cli import run
from intarsia.config import load_config
from intarsia.forwarding import ComposedModel
from intarsia.quantizing.calibration import Calibration
from intarsia.scoring import compare, perplexity
from models import tiny_llama

EXACT = ["-o", "engine.dtype=float32", "-o", "engine.threads=1", "-o", "cache.memory=8MiB"]
TEXT = "A text of some length, which says little. " * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), hidden=32, layers=2, ffn=32, max_len=128)[0]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def cli(capsys):
    """Run a command in this process; return what it printed."""

    def call(*args):
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out, err

    return call


@pytest.fixture
def refused(capsys):
    """Run a command that must end with one message on stderr and nothing else; return the message."""

    def call(*args):
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1), (code, out, err)
        return err

    return call


def opened(model, **sections):
    engine = {"dtype": "float32", "threads": 1}
    made = ComposedModel.compose(load_config({"model": str(model), "engine": engine, "cache": CACHE} | sections))
    made.start(lambda *_: None)
    return made


# --- perplexity -------------------------------------------------------------------------------------------------------


def test_json_says_what_was_scored_and_how(cli, model, text):
    out, err = cli("eval", "perplexity", model, *EXACT, "--text", text, "--window", 40, "--stride", 16, "--json")
    report = json.loads(out)
    with opened(model) as reference:
        ids = reference.encode(TEXT)
        expected = perplexity(reference, ids, window=40, stride=16, progress=lambda *_: None)
    (scored,) = report["models"]
    assert scored["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert scored["perplexity"] == pytest.approx(expected.perplexity, rel=1e-5)
    assert (scored["model"], scored["dtype"], scored["parts"]["cache"]) == (str(model), "float32", ["paged"])
    assert (report["text"], report["tokens"], report["scored"]) == ("text.txt", 210, 209)
    assert (report["window"], report["stride"], report["windows"]) == (40, 16, 12)
    assert report["seconds"] > 0
    assert "comparison" not in report
    assert err == ""


def test_the_default_text_is_cut_and_the_window_is_the_model_s_at_most(cli, model):
    out, _ = cli("eval", "perplexity", "-m", model, *EXACT, "--tokens", 300, "--json")
    report = json.loads(out)
    assert (report["text"], report["tokens"], report["scored"]) == ("pydoc_data.topics", 300, 299)
    assert (report["window"], report["stride"]) == (128, 64)


def test_no_number_of_tokens_is_all_of_the_text(cli, model, text):
    out, _ = cli("eval", "perplexity", model, *EXACT, "--text", text, "--tokens", 0, "--json")
    assert json.loads(out)["tokens"] == len(TEXT)


def test_a_table_shows_the_same_figures(cli, model, text):
    args = ["eval", "perplexity", model, *EXACT, "--text", text]
    report = json.loads(cli(*args, "--json")[0])
    lines = dict(line.split(maxsplit=1) for line in cli(*args)[0].splitlines())
    assert lines["perplexity"] == f"{report['models'][0]['perplexity']:.4f}"
    assert lines["tokens"] == "210 of text.txt, 209 scored"
    assert lines["windows"] == "3 of 128 tokens, 64 apart"


def test_vs_compares_with_what_it_changes(cli, model, text):
    args = ["eval", "perplexity", model, *EXACT, "--text", text, "--vs", "quantizer=int8", "--vs", "cache.page_size=32"]
    report = json.loads(cli(*args, "--json")[0])
    with opened(model) as a, opened(model, quantizer="int8") as b:
        expected = compare(a, b, a.encode(TEXT), window=128, stride=64, progress=lambda *_: None)
    assert [each["name"] for each in report["models"]] == ["as given", "quantizer=int8 cache.page_size=32"]
    assert report["models"][1]["parts"]["quantizer"] == ["int8"]
    assert report["models"][1]["weight_bytes"] < report["models"][0]["weight_bytes"]
    assert report["comparison"]["mean_kl"] == pytest.approx(expected.mean_kl, rel=1e-3) != 0
    assert report["comparison"]["top1_agreement"] == expected.agreement
    shown = cli(*args)[0]
    assert f"mean {report['comparison']['mean_kl']:.6f}, max" in shown
    assert f"the same for {100 * expected.agreement:.2f}%" in shown


def test_compare_takes_files_that_share_the_model_and_overrides(cli, model, text, tmp_path):
    (tmp_path / "a.toml").write_text('[cache]\npage_size = 32\nmemory = "8MiB"\n')
    (tmp_path / "b.toml").write_text('quantizer = "int8"\n[cache]\nmemory = "8MiB"\n')
    sides = [tmp_path / "a.toml", tmp_path / "b.toml"]
    args = ["eval", "perplexity", model, "-o", "engine.dtype=float32", "--text", text, "--compare", *sides, "--json"]
    report = json.loads(cli(*args)[0])
    assert [each["name"] for each in report["models"]] == [str(side) for side in sides]
    assert [each["dtype"] for each in report["models"]] == ["float32", "float32"]
    assert [each["parts"].get("quantizer") for each in report["models"]] == [None, ["int8"]]


def test_compare_takes_values_that_are_put_on_the_config(cli, model, text):
    sides = ["engine.dtype=bfloat16", "engine.dtype=float32"]
    report = json.loads(cli("eval", "perplexity", model, *EXACT, "--text", text, "--compare", *sides, "--json")[0])
    assert [each["dtype"] for each in report["models"]] == ["bfloat16", "float32"]
    assert 0 < report["comparison"]["mean_kl"] < 0.1


def test_what_contradicts_itself_is_refused(refused, model, tmp_path):
    (tmp_path / "a.toml").write_text(f'model = "{model}"\n')
    command = ["eval", "perplexity"]
    assert "MODEL and -m are both given" in refused(*command, model, "-m", model)
    assert "--vs and --compare are both given" in refused(
        *command, model, "--vs", "quantizer=int8", "--compare", "quantizer=int8", "quantizer=int4"
    )
    assert "is given twice" in refused(*command, model, "--compare", "quantizer=int8", "quantizer=int8")
    assert "both name a config file" in refused(
        *command, "-c", tmp_path / "a.toml", "--compare", tmp_path / "a.toml", "quantizer=int8"
    )
    assert "model: none is named" in refused(*command)
    assert "cannot read this config file" in refused(*command, model, "--compare", "a.toml", "quantizer=int8")


def test_what_cannot_be_scored_is_refused_before_the_model_loads(refused, model, tmp_path):
    command = ["eval", "perplexity", model, *EXACT]
    (tmp_path / "empty").write_text("")
    (tmp_path / "one").write_text("a")
    assert "text: it has no token" in refused(*command, "--text", tmp_path / "empty")
    assert "text: it has one token" in refused(*command, "--text", tmp_path / "one")
    assert "text: it has one token" in refused(*command, "--tokens", 1)
    assert "window: 129 is more than the 128 tokens of engine.max_model_len" in refused(*command, "--window", 129)
    assert "stride: 9 is not from 1 to the window's 8 tokens" in refused(*command, "--window", 8, "--stride", 9)
    assert "window: 0 is too short" in refused(*command, "--window", 0)
    mute, _ = tiny_llama(tmp_path, layers=1, vocab=100)
    assert "hold no tokenizer" in refused("eval", "perplexity", mute, *EXACT)


def test_two_tokenizers_cannot_be_compared(refused, model, tmp_path):
    other, _ = tiny_llama(tmp_path, layers=1, max_len=128)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    (first, one), (second, two) = list(vocabulary.items())[64:66]
    vocabulary |= {first: two, second: one}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refused("eval", "perplexity", model, *EXACT, "--vs", f"model.use={json.dumps(str(other))}")
    assert "read the text as different tokens" in message


# --- calibrate --------------------------------------------------------------------------------------------------------


def test_calibrate_writes_a_file_that_quantizers_read(cli, model, text, tmp_path):
    out, err = cli("calibrate", model, *EXACT, "--text", text, "--out", tmp_path / "c", "--window", 64)
    assert out == f"{tmp_path / 'c'}: 9 linears of {model.name}, 210 tokens of text.txt\n"
    assert err.endswith(" s\n")
    calibration = Calibration.open(tmp_path / "c", "x")
    assert (calibration.model, calibration.num_tokens) == (model.name, 210)
    assert calibration.of("layers.1.down.weight", 32, "x").sample.shape == (210, 32)
    with safe_open(tmp_path / "c", "pt") as file:
        assert file.metadata()["format"] == "intarsia-calibration"


def test_calibrate_reads_docstrings_by_default(cli, model, tmp_path):
    out, _ = cli("calibrate", "-m", model, *EXACT, "--out", tmp_path / "c", "--tokens", 600, "--window", 100)
    assert "600 tokens of docstrings of the standard library" in out
    assert Calibration.open(tmp_path / "c", "x").of("head", 32, "x").sample.shape == (512, 32)


def test_a_place_that_cannot_be_written_is_refused_before_the_work(refused, model, tmp_path):
    for out in (tmp_path, tmp_path / "missing" / "c"):
        assert f"--out: '{out}' cannot be written" in refused("calibrate", model, *EXACT, "--out", out)


def test_a_refused_calibration_leaves_the_file_that_was_there(refused, model, tmp_path):
    (tmp_path / "c").write_text("before")
    (tmp_path / "bytes").write_bytes(b"\xff")
    command = ["calibrate", model, *EXACT, "--out", tmp_path / "c"]
    assert "window: 129 is more than the 128 tokens" in refused(*command, "--window", 129)
    assert "is not UTF-8 text" in refused(*command, "--text", tmp_path / "bytes")
    assert (tmp_path / "c").read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bytes", "c"]
