"""The plugin: which paths it takes, why not the others, and that asking costs no torch."""

import os
import subprocess
import sys

import pytest

import intarsia_gguf
from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, Unfit
from tools import gguf_bytes as gb

(PROVIDER,) = intarsia_gguf.provide_loaders()


def fit(path):
    return PROVIDER.fit(LoaderContext(path=path))


def build(path):
    return PROVIDER.build(LoaderContext(path=path))


def test_a_gguf_file_fits_whatever_its_name(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(gb.tiny_file())
    assert fit(path) == Fit(50, "model.bin is a GGUF file")
    assert build(path).open().config["model_type"] == "llama"


def test_a_folder_with_one_gguf_file_fits(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gb.tiny_file())
    (tmp_path / "README.md").write_text("hello")
    assert isinstance(fit(tmp_path), Fit)
    assert len(build(tmp_path).open().tensors) == 11


def test_a_folder_with_several_gguf_files_is_unfit_and_names_them(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(gb.tiny_file())
    found = fit(tmp_path)
    assert isinstance(found, Unfit) and "a.gguf, b.gguf" in found.reason
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        build(tmp_path)


def test_a_hugging_face_folder_is_unfit(tmp_path):
    (tmp_path / "model.gguf").write_bytes(gb.tiny_file())
    (tmp_path / "config.json").write_text("{}")
    found = fit(tmp_path)
    assert isinstance(found, Unfit) and "config.json" in found.reason


def test_an_empty_folder_is_unfit(tmp_path):
    found = fit(tmp_path)
    assert isinstance(found, Unfit) and ".gguf" in found.reason


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04", b"GGML" + bytes(100)])
def test_another_file_is_unfit_and_refused_if_asked_for(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    found = fit(path)
    assert isinstance(found, Unfit) and "model.gguf" in found.reason
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        build(path).open()


def test_a_pipe_is_unfit_at_once(tmp_path):
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    assert isinstance(fit(path), Unfit)
    with pytest.raises(CheckpointError, match=r"pipe\.gguf"):
        build(path)


def test_a_file_that_is_gone_is_an_error_with_its_name(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file())
    loader = build(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        loader.open()
    assert isinstance(fit(path), Unfit)


def test_the_plugin_and_its_fit_import_neither_torch_nor_gguf(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file())
    code = (
        "import sys, pathlib, intarsia_gguf as plugin; from intarsia.protocols import LoaderContext;"
        "(provider,) = plugin.provide_loaders();"
        f"provider.fit(LoaderContext(path=pathlib.Path({str(path)!r})));"
        "print([name for name in ('torch', 'gguf', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reports_name_the_widest_stored_dtype(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file())
    assert build(path).open().dtype == "float32"
    halves = [(name, shape, gb.T_F16, raw[: len(raw) // 2]) for name, shape, _, raw in gb.tiny_tensors()]
    path.write_bytes(gb.tiny_file(tensors=halves))
    assert build(path).open().dtype == "float16"
