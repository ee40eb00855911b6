"""The command line around its commands: help, plugins and their commands, explain, and how errors are told."""

import io
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from intarsia.cli import run
from intarsia.cli.explain import size
from intarsia.cli.terminal import one_line, write
from models import tiny_llama


@pytest.fixture
def cli(capsys, monkeypatch):
    """Run a command in this process; stdin is empty and no terminal."""

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def refused(cli):
    """Run a command that must end with one message on stderr and nothing else; return the message."""

    def call(*args, exit_code=2):
        code, out, err = cli(*args)
        assert (code, out) == (exit_code, ""), (code, out, err)
        assert err.startswith("intarsia: error: ")
        assert err.count("\n") == 1, err
        return err

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), hidden=32, layers=2, ffn=32)[0]


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay out an installed plugin: a module and a dist-info folder, on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)

    def call(name, source):
        (tmp_path / f"cli_fake_{name}.py").write_text(textwrap.dedent(source))
        info = tmp_path / f"fake_{name}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[intarsia]\n{name} = cli_fake_{name}\n")
        monkeypatch.delitem(sys.modules, f"cli_fake_{name}", raising=False)

    return call


GREET = """
    import click
    from intarsia.hookspecs import hookimpl
    from intarsia.types import Provider

    class Greet:
        def command(self):
            @click.command("KEY")
            @click.argument("name")
            def greet(name):
                click.echo(f"KEY {name}")
                raise SystemExit(3 if name == "three" else 0)
            return greet

    @hookimpl
    def provide_commands():
        return [Provider(key="KEY", summary="says KEY", build=lambda context: Greet())]
"""


# --- help, version, unknown words -------------------------------------------------------------------------------------


def test_help_lists_the_commands(cli):
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for name in ("generate", "chat", "plugins", "explain"):
        assert f"  {name} " in out


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["plugins", "--json"], ["plugins"], ["generate", "-h"]])
def test_what_needs_no_model_imports_no_torch(args):
    source = (
        "import sys; from intarsia.cli import run; code = run(sys.argv[1:]); "
        "sys.exit(code or (9 if {'torch', 'transformers', 'tokenizers'} & sys.modules.keys() else 0))"
    )
    done = subprocess.run([sys.executable, "-c", source, *args], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_version_is_the_distributions(cli):
    from importlib.metadata import version

    assert cli("--version") == (0, f"intarsia {version('intarsia')}\n", "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["genrate"], ["'genrate'", "'generate'"]),
        (["--nope"], ["--nope"]),
        (["generate", "--max-token", "3", "x"], ["--max-token", "--max-tokens"]),
        (["generate", "-m", "smollm2", "--top-k", "1.5", "x"], ["--top-k", "1.5"]),
        (["generate", "-m", "smollm2", "--token-ids", "1,,2"], ["--token-ids", "1,2,3"]),
        (["generate", "-m", "smollm2", "--token-ids", "1,a"], ["--token-ids", "'a'"]),
        (["generate", "-m", "smollm2", "--token-ids", "9" * 5000], ["--token-ids", "999..."]),
        (["generate", "-m", "smollm2", "--token-ids", "1", "x"], ["PROMPT", "--token-ids"]),
        (["generate", "-m", "smollm2", "--token-ids", "1", "--chat"], ["--chat", "--token-ids"]),
        (["generate", "-m", "smollm2", "--logprobs", "1", "x"], ["--logprobs", "--json"]),
        (["generate", "-m"], ["-m"]),
        (["explain", "stray"], ["stray"]),
    ],
)
def test_usage_errors_are_one_line_that_names_the_option(refused, args, words):
    message = refused(*args)
    for word in words:
        assert word in message


def test_no_prompt_at_a_terminal_is_a_usage_error(refused, monkeypatch):
    monkeypatch.setattr("intarsia.cli.generate.is_terminal", lambda stream: True)
    assert "no prompt is given" in refused("generate", "-m", "smollm2")


def test_a_command_without_a_model_says_how_to_name_one(refused):
    for command in ("generate", "explain", "chat"):
        assert "-m smollm2" in refused(command)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--temperature", "nan"], ["sampling.temperature", "nan"]),
        (["--temperature", "-1"], ["sampling.temperature", "-1"]),
        (["--top-p", "1.5"], ["sampling.top_p", "1.5"]),
        (["--top-k", "-2"], ["sampling.top_k", "-2"]),
        (["--max-tokens", "0"], ["sampling.max_tokens", "0"]),
        (["--seed", "-1"], ["sampling.seed", "-1"]),
        (["--stop", ""], ["sampling.stop"]),
        (["-n", "0"], ["sampling.n", "0"]),
        (["--json", "--logprobs", "-1"], ["sampling.logprobs"]),
        (["--logits-processor", "structured_output"], ["'structured_output'", "KEY.OPTION=VALUE"]),
        (["--logits-processor", "structured_output={}"], ["'structured_output={}'", "KEY.OPTION=VALUE"]),
        (["--logits-processor", "a.b=1", "--logits-processor", "a.b=2"], ["a.b", "twice"]),
    ],
)
def test_sampling_options_out_of_range_name_the_field(refused, args, words):
    message = refused("generate", "-m", "smollm2", *args, "x")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["-m", "./no/such/model.gguf"], ["./no/such/model.gguf"]),
        (["-m", "smolm2"], ["'smolm2'", "'smollm2'"]),
        (["-c", "no/such/engine.toml"], ["no/such/engine.toml", "No such file"]),
        (["-c", "bad.toml"], ["bad.toml", "line 2"]),
        (["-c", "section.toml"], ["schedular", "'scheduler'"]),
        (["-c", "option.toml"], ["cache.page_sise", "page_size"]),
        (["-m", "smollm2", "-o", "cache.page_size"], ["cache.page_size", "path=value"]),
        (["-m", "smollm2", "-o", "cache.page_size=two"], ["cache.page_size", "two"]),
        (["-m", "smollm2", "-o", "scheduler=statik"], ["scheduler", "'statik'", "'static'"]),
        (["-m", "smollm2", "-o", "plugins.block=['gguff']"], ["plugins.block", "gguff"]),
        (["-m", "bad.toml"], ["bad.toml"]),
    ],
)
def test_a_wrong_config_or_model_is_one_line_that_names_it(refused, args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text("[cache]\npage_size = = 3\n")
    Path("section.toml").write_text("[schedular]\nmax_batch = 2\n")
    Path("option.toml").write_text('model = "smollm2"\n[cache]\npage_sise = 3\n')
    message = refused("generate", *args, "x")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([""], ["prompt", "no tokens"]),
        (["x" * 512], ["prompt", "512", "511"]),
        (["--token-ids", "1,257"], ["prompt", "257", "vocabulary"]),
        (["--token-ids", "-1"], ["prompt", "-1"]),
        (["half \udcff of a character"], ["prompt", "Unicode"]),
    ],
)
def test_a_prompt_that_cannot_run_is_one_line_that_says_why(refused, args, words, model):
    message = refused("generate", "-m", model, *args)
    for word in words:
        assert word in message


def test_a_prompt_on_stdin_that_is_no_text_is_refused(cli, model):
    code, out, err = cli("generate", "-m", model, stdin=b"caf\xe9 au lait")
    assert (code, out) == (2, "")
    assert "stdin is not UTF-8" in err


def test_an_answer_that_fails_exits_1(refused, cli, install, model):
    install(
        "broken_processor",
        """
        from intarsia.hookspecs import hookimpl
        from intarsia.protocols import LogitsProcessor
        from intarsia.types import Provider

        class Processor(LogitsProcessor):
            def open(self, params, num_prompt):
                return self
            def process(self, token_ids, logits_V):
                raise ValueError("no such grammar")

        @hookimpl
        def provide_logits_processors():
            return [Provider(key="broken", summary="fails", build=lambda context: Processor())]
        """,
    )
    failing = ["generate", "-m", model, "-o", "logits_processors=broken", "x"]
    code, out, err = cli(*failing)
    assert (code, out) == (1, "\n")
    assert "no such grammar" in err
    assert err.count("\n") == 1
    code, out, err = cli(*failing, "--json")
    assert code == 1
    assert json.loads(out)["finish_reason"] == "error"
    assert "no such grammar" in err


def test_a_fault_of_our_own_is_one_line_and_a_traceback_on_demand(refused, cli, monkeypatch):
    def fail(*_):
        raise KeyError("lost\nand gone")

    monkeypatch.setattr("intarsia.cli.plugins.Registry.discover", fail)
    assert "KeyError" in refused("plugins", exit_code=1)
    monkeypatch.setenv("INTARSIA_DEBUG", "1")
    code, out, err = cli("plugins")
    assert (code, out) == (1, "")
    assert "Traceback" in err


def test_debug_is_an_option_too(cli, monkeypatch):
    monkeypatch.setenv("INTARSIA_DEBUG", "")  # put back afterwards
    code, _, err = cli("--debug", "generate", "-c", "no/such.toml", "x")
    assert code == 2
    assert "Traceback" in err


def test_a_message_is_one_line_without_control_characters():
    assert one_line("two\nlines\n  and \x1b[31mred\x07") == r"two lines and \x1b[31mred\x07"


def test_a_terminal_gets_no_control_characters_of_a_model(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stream, shown in ((Terminal(), "a\n\tb�]0;title�"), (io.StringIO(), "a\n\tb\x1b]0;title\x07")):
        monkeypatch.setattr(sys, "stdout", stream)
        write("a\n\tb\x1b]0;title\x07")
        assert stream.getvalue() == shown


# --- plugins ----------------------------------------------------------------------------------------------------------


def test_plugins_lists_every_part_with_its_distribution(cli):
    code, out, err = cli("plugins", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert all(list(row) == ["hook", "key", "plugin", "distribution", "version", "summary"] for row in rows)
    by_key = {(row["hook"], row["key"]): row for row in rows}
    gguf = by_key["provide_loaders", "gguf"]
    assert (gguf["plugin"], gguf["distribution"]) == ("gguf", "intarsia")
    assert by_key["provide_schedulers", "static"]["plugin"] == "defaults"
    _, table, _ = cli("plugins")
    for row in rows:
        assert row["hook"] in table
        assert row["key"] is None or row["key"] in table  # hooks that check have no key


def test_plugins_obeys_allow(cli):
    code, out, _ = cli("plugins", "--json", "-o", "plugins.allow=[]")
    assert code == 0
    assert {row["plugin"] for row in json.loads(out)} == {"defaults"}
    _, _, err = cli("plugins", "-o", "plugins.allow=[]")
    assert "left out" in err
    assert "gguf" in err


def test_a_plugin_that_only_observes_is_listed_too(cli, install):
    install(
        "watcher",
        '''
        from intarsia.hookspecs import hookimpl
        print("a plugin that chatters")

        @hookimpl
        def request_finished(output):
            """Counts [answers]."""
        ''',
    )
    _, out, err = cli("plugins", "--json")
    (row,) = [row for row in json.loads(out) if row["plugin"] == "watcher"]
    assert row == {
        "hook": "request_finished",
        "key": None,
        "plugin": "watcher",
        "distribution": "fake-watcher",
        "version": "1.5",
        "summary": "Counts [answers].",
    }
    assert err == "a plugin that chatters\n"
    assert "Counts [answers]." in cli("plugins")[1]


def test_a_plugin_that_fails_to_import_is_one_line_that_names_it(refused, install, model):
    install("broken", "import no_such_module_at_all")
    for command in (["plugins"], ["generate", "-m", model, "x"], ["explain", "-m", model]):
        message = refused(*command)
        for word in ("'broken'", "fake-broken 1.5", "no_such_module_at_all", "plugins.block"):
            assert word in message


def test_a_broken_plugin_can_be_blocked(cli, install):
    install("broken", "import no_such_module_at_all")
    assert cli("plugins", "-o", 'plugins.block=["broken"]')[0] == 0


def test_two_plugins_with_one_key_are_refused_and_both_named(refused, install, model):
    for name in ("first", "second"):
        install(name, GREET.replace("KEY", "greet"))
    for command in (["plugins"], ["generate", "-m", model, "x"]):
        message = refused(*command)
        for word in ("'greet'", "fake-first 1.5", "fake-second 1.5"):
            assert word in message


# --- commands of plugins ----------------------------------------------------------------------------------------------


def test_a_plugins_command_is_listed_and_runs(cli, install):
    install("greeter", GREET.replace("KEY", "greet"))
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    assert "greet" in out
    assert "says greet" in out
    assert cli("greet", "you") == (0, "greet you\n", "")
    assert cli("greet", "three") == (3, "greet three\n", "")
    code, _, err = cli("greet")
    assert code == 2
    assert "intarsia greet --help" in err


def test_help_survives_a_broken_plugin_and_says_so_in_one_line(cli, install):
    install("broken", "raise RuntimeError('two\\nlines')")
    install("greeter", GREET.replace("KEY", "greet"))
    code, out, err = cli("--help")
    assert code == 0
    assert "generate" in out
    assert "says greet" in out, "the others' commands are there still"
    assert err.startswith("intarsia: warning: ")
    assert "fake-broken 1.5" in err
    assert err.count("\n") == 1
    code, out, _ = cli("greet", "you")
    assert (code, out) == (0, "greet you\n")


def test_a_command_that_two_plugins_claim_is_nobodys(cli, install):
    for name in ("first", "second"):
        install(name, GREET.replace("KEY", "greet"))
    code, out, err = cli("--help")
    assert code == 0
    assert "says greet" not in out
    assert err.count("\n") == 1
    assert "fake-first 1.5" in err
    assert "fake-second 1.5" in err
    code, out, err = cli("greet", "you")
    assert (code, out) == (2, "")


def test_our_own_command_wins_over_a_plugins_and_that_is_said(cli, install):
    install("thief", GREET.replace("KEY", "plugins"))
    code, out, err = cli("--help")
    assert code == 0
    assert "says plugins" not in out
    assert "fake-thief 1.5" in err
    assert cli("plugins", "--json")[0] == 0


@pytest.mark.parametrize(
    "build", ["lambda context: 1 / 0", "lambda context: type('C', (), {'command': lambda s: 5})()"]
)
def test_a_command_that_cannot_be_made_names_its_plugin(refused, install, build):
    install(
        "unmade",
        f"""
        from intarsia.hookspecs import hookimpl
        from intarsia.types import Provider

        @hookimpl
        def provide_commands():
            return [Provider(key="unmade", summary="cannot be made", build={build})]
        """,
    )
    message = refused("unmade")
    for word in ("'unmade'", "fake-unmade 1.5"):
        assert word in message


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_json_is_the_engines_report(cli, model):
    from intarsia import Engine

    args = ["-m", model, "-o", "cache.page_size=32", "-o", "cache.memory=8MiB", "-o", "engine.dtype=float32"]
    code, out, err = cli("explain", *args, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    with Engine.from_config({"model": str(model)}, overrides=args[3::2]) as engine:
        expected = json.loads(json.dumps(engine.explain()))
    report["memory"].pop("free"), expected["memory"].pop("free")
    assert report == expected
    assert report["parts"]["scheduler"].keys() >= {"key", "provider", "reason"}


def test_explain_shows_each_part_and_the_memory_in_words(cli, model):
    args = ["-m", model, "-o", "scheduler=static", "-o", "cache.memory=8MiB", "-o", "engine.dtype=float32"]
    code, out, err = cli("explain", *args)
    assert (code, err) == (0, "")
    (scheduler,) = [line for line in out.splitlines() if line.startswith("scheduler")]
    assert "static" in scheduler
    assert "config" in scheduler
    # 4 heads over 2 of 32 / 4 = 8 numbers, in 2 layers, of 4 bytes: 256 bytes a token, so 8 MiB hold 32768 of them.
    assert "256 bytes = 2 x 2 layers x 2 kv heads x 8 head dim x 4 bytes" in out
    assert "2048 pages of 16 tokens, for 32768 tokens" in out
    assert "64 sequences" in out  # of the 512 tokens that it was trained for
    assert json.loads(cli("explain", *args, "--json")[1])["hash"] in out


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (538 * 2**20, "538.0 MiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_sizes_are_shown_in_the_unit_that_fits(num_bytes, shown):
    assert size(num_bytes) == shown


def test_explain_loads_no_weights(model, cli, monkeypatch):
    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("intarsia.stage.load_weights", fail)
    assert cli("explain", "-m", model)[0] == 0


def test_environment_of_a_run_is_left_as_it_was(cli, monkeypatch):
    import logging
    import signal

    handlers = list(logging.getLogger("intarsia").handlers), signal.getsignal(signal.SIGINT)
    cli("plugins")
    assert (logging.getLogger("intarsia").handlers, signal.getsignal(signal.SIGINT)) == handlers
    assert "INTARSIA_DEBUG" not in os.environ
