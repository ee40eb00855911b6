"""The texts that models are measured with: the same at each call, English, and apart from each other."""

import sysconfig
from pathlib import Path

import pytest

from intarsia import corpora
from intarsia.errors import ConfigError


def test_the_evaluation_text_is_every_help_topic_in_the_order_of_names():
    from pydoc_data.topics import topics

    text = corpora.evaluation_text()
    assert text.source == "pydoc_data.topics"
    assert text.content == "\n\n".join(text for _, text in sorted(topics.items()))
    assert len(text.content) > 400_000


def test_the_calibration_text_is_the_same_at_each_call_and_long_enough():
    text = corpora.calibration_text()
    assert text == corpora.calibration_text()
    assert len(text.content) > 300_000


@pytest.mark.parametrize("module", corpora.DOCUMENTED)
def test_every_module_that_is_named_has_docstrings_here(module):
    assert corpora._docstrings(module)


def test_a_module_s_docstrings_are_those_that_it_has():
    import textwrap

    found = corpora._docstrings("textwrap")
    assert textwrap.__doc__.strip() in found
    assert any(docstring.startswith("Fill a single paragraph of text") for docstring in found)


def test_calibration_reads_nothing_that_is_evaluated():
    evaluated = {line.strip() for line in corpora.evaluation_text().content.splitlines() if len(line.strip()) > 40}
    lines = [line.strip() for line in corpora.calibration_text().content.splitlines() if len(line.strip()) > 40]
    assert sum(line in evaluated for line in lines) < len(lines) / 1000


def test_a_python_without_sources_asks_for_a_file(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    with pytest.raises(ConfigError, match="--text: this Python has no sources"):
        corpora.calibration_text()


def test_a_file_is_read_without_its_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffé\r\n".encode())
    assert corpora.read_text(tmp_path / "a.txt") == corpora.Text("a.txt", "é\r\n")


@pytest.mark.parametrize(("name", "message"), [("bytes", "is not UTF-8"), ("missing", "cannot be read"), (".", "read")])
def test_a_file_that_is_no_text_is_refused_by_its_path(tmp_path: Path, name, message):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"--text: .*{name}.*{message}"):
        corpora.read_text(tmp_path / name)
