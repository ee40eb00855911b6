"""`intarsia plugins check`: what is kept, skipped, broken, untold; crashes and hangs; nothing of the user's folder."""

import json
import sys
import textwrap

import pytest

from intarsia.cli import run
from intarsia.hookspecs import KINDS
from intarsia.testing.suites import SUITES
from plugin_packages import lay_out, path_of

PROJECT = """
[project]
name = "fake-plugin"
version = "2.5"
description = "For tests."
requires-python = ">=3.11"
dependencies = ["intarsia>=0.1"]
[project.entry-points.intarsia]
fake = "fake_plugin"
[project.entry-points."intarsia.contracts"]
"""
COMMANDS = """
import click
from attrs import frozen
from intarsia.hookspecs import hookimpl
from intarsia.types import Provider

HELP = "Say how it is."
KEYS = ("fake_one",)

class Say:
    def __init__(self, context):
        self.context = context

    def command(self):
        return click.Command(KEYS[0], help=HELP, callback=lambda: None)

@hookimpl
def provide_commands():
    return [Provider(key=key, summary="Say how it is.", build=Say) for key in KEYS]
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay out an installed plugin `fake` of this source, with contracts of its own by part; be in another folder."""

    def call(source=COMMANDS, contracts="", project=PROJECT, **entries):
        package = tmp_path / "package"
        package.mkdir()
        lines = "".join(f'"{part.replace("__", ".")}" = "{where}"\n' for part, where in entries.items())
        (package / "pyproject.toml").write_text(project + lines)
        (package / "fake_plugin.py").write_text(textwrap.dedent(source))
        (package / "fake_contracts.py").write_text(textwrap.dedent(contracts))
        path = [package, lay_out(package)]
        for folder in path:
            monkeypatch.syspath_prepend(folder)
        for module in ("fake_plugin", "fake_contracts"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.setenv("PYTHONPATH", path_of(*path))
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        return tmp_path / "elsewhere"

    return call


@pytest.fixture
def check(capsys):
    """Run `plugins check`; return exit code, stdout and stderr."""

    def call(*args):
        capsys.readouterr()
        code = run(["plugins", "check", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def claims_of(out, part):
    report = json.loads(out)
    (found,) = [each for each in report["parts"] if each["part"] == part]
    return {claim["claim"]: claim for claim in found["claims"]}


def test_a_plugin_that_keeps_its_contracts_is_reported_part_by_part(install, check):
    install()
    code, out, err = check("fake")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "fake (fake-plugin 2.5)"
    assert lines[1].split()[0] == "plugin"
    assert "4 kept, 1 untold" in lines[1]
    assert any(line.startswith("commands.fake_one  6 kept") and line.endswith("CommandContract") for line in lines)
    assert "a_license_is_named" in out


def test_json_has_every_claim_with_what_it_says(install, check):
    install()
    code, out, _ = check("fake", "--json")
    report = json.loads(out)
    assert code == 0
    assert (report["plugin"], report["distribution"], report["version"], report["ok"]) == (
        "fake", "fake-plugin", "2.5", True,
    )  # fmt: skip
    claim = claims_of(out, "commands.fake_one")["test_help_exits_0"]
    assert claim["says"].startswith("`--help` shows the usage")
    assert (claim["outcome"], claim["message"]) == ("kept", "")


def test_a_broken_claim_is_told_with_its_message_and_exits_1(install, check):
    install(COMMANDS.replace('"Say how it is."\nKEYS', '""\nKEYS'))
    code, out, err = check("fake", "-q")
    assert code == 1
    assert "broken   test_help_says_what_it_does\n" in out
    assert "the command has no help text" in out
    assert "untold" not in out.partition("\n")[2].partition("\n")[2], "-q says what is broken alone"
    assert err == "intarsia: error: plugin 'fake' does not keep the contracts of commands.fake_one\n"
    assert "Traceback" not in out
    assert "assert" in check("fake", "-v", "--part", "commands.fake_one")[1]


OWN = """
    from intarsia.testing.commands import CommandContract
    from fake_plugin import provide_commands
    import os, signal, time
    import pytest

    class Contract(CommandContract):
        def provider(self):
            return provide_commands()[0]

        @pytest.mark.parametrize("number", [1, 2, 3])
        def test_of_its_own(self, number):
            '''It counts.'''
            print("chatter")
            BODY
"""


VARIANTS = [
    ("number != 2 or pytest.exit('enough', returncode=0)", "broken", "it ended the whole session"),
    ("os.write(1, b'{\\n')", "kept", ""),
    ("assert number < 4", "kept", ""),
    ("assert number != 2, 'two is wrong'", "broken", "two is wrong"),
    ("pytest.skip('not made')", "skipped", "not made"),
    ("raise KeyError('x')", "broken", "KeyError: 'x'"),
    ("raise SystemExit(3)", "broken", "SystemExit: 3"),
    ("number != 2 or os._exit(9)", "broken", "the process ended with exit code 9"),
]
BODIES = [
    ("raise NotImplementedError('say what the answer is')", "untold", "say what the answer is"),
    ("number != 2 or os.kill(os.getpid(), signal.SIGSEGV)", "broken", "by signal SIGSEGV"),
    ("number != 2 or time.sleep(60)", "broken", "it took longer than 2 s"),
    ("if number == 2: raise KeyboardInterrupt", "broken", "it ended the whole session"),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in VARIANTS),
]


@pytest.mark.parametrize(("body", "outcome", "message"), BODIES)
def test_a_plugins_own_contract_is_run_and_survives_crashes_and_hangs(install, check, body, outcome, message):
    install(contracts=OWN.replace("BODY", body), commands__fake_one="fake_contracts:Contract")
    code, out, _ = check("fake", "--json", "--part", "commands.fake_one", "--timeout", "2")
    assert code == (1 if outcome == "broken" else 0)
    claims = claims_of(out, "commands.fake_one")
    assert (claims["test_of_its_own"]["outcome"], len(claims)) == (outcome, 7)
    assert message in claims["test_of_its_own"]["message"]
    others = {claim["outcome"] for name, claim in claims.items() if name != "test_of_its_own"}
    assert others == {"kept"}, "the other claims are run all the same"


@pytest.mark.parametrize(
    ("contracts", "words"),
    [
        ("class Contract: pass", ["inherits no CommandContract"]),
        pytest.param(
            "import no_such_module_at_all",
            ["cannot be imported", "no_such_module_at_all"],
            marks=pytest.mark.slow,
        ),
        pytest.param("Contract = 5", ["is no class"], marks=pytest.mark.slow),
    ],
)
def test_a_contract_that_cannot_hold_the_part_is_refused(install, check, contracts, words):
    install(contracts=contracts, commands__fake_one="fake_contracts:Contract")
    code, out, err = check("fake")
    assert code == 1
    assert "commands.fake_one" in err
    for word in (*words, "fake-plugin 2.5"):
        assert word in out


def test_parts_and_claims_can_be_named(install, check):
    install(COMMANDS.replace('("fake_one",)', '("fake_one", "fake_two")'))
    code, out, _ = check("fake", "--part", "commands.fake_one", "--claim", "test_help_exits_0", "--json")
    assert code == 0
    assert list(claims_of(out, "commands.fake_one")) == ["test_help_exits_0"]
    assert len(json.loads(out)["parts"]) == 1
    code, out, _ = check("fake", "--claim", "summaries_are_one_line")
    assert code == 0
    assert "commands" not in out
    code, out, err = check("fake", "--part", "commands.fake_three")
    assert (code, out) == (2, "")
    assert "Did you mean 'commands.fake_two'" in err or "'commands.fake_one'" in err
    code, out, err = check("fake", "--claim", "test_help_exits_1")
    assert (code, out) == (2, "")
    assert "Did you mean 'test_help_exits_0'" in err


@pytest.mark.slow
def test_a_claim_that_is_asked_for_and_not_made_is_no_failure(install, check):
    skipping = OWN.replace("BODY", "pytest.skip('not made')")
    install(contracts=skipping, commands__fake_one="fake_contracts:Contract")
    code, out, _ = check("fake", "--claim", "test_of_its_own")
    assert code == 0
    assert "skipped  test_of_its_own: not made" in out


@pytest.mark.slow
def test_a_key_of_another_name_than_the_command_is_found(install, check):
    install(COMMANDS.replace('("fake_one",)', '("fake_one", "fake_two")'))
    code, out, _ = check("fake", "--part", "commands.fake_two", "-q")
    assert code == 1
    assert "the command is called 'fake_one', its key is 'fake_two'" in out


def test_nothing_of_the_users_folder_takes_part(install, check, monkeypatch):
    folder = install()
    (folder / "conftest.py").write_text("raise SystemExit('the user's conftest ran')")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--nor-this'\n")
    (folder / "click.py").write_text("raise SystemExit('a stray module was imported')")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--nor-that")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    before = sorted(folder.rglob("*"))
    code, out, err = check("fake")
    assert (code, err) == (0, ""), out
    assert sorted(folder.rglob("*")) == before, "nothing is left behind"


@pytest.mark.slow
def test_relative_paths_of_modules_hold(install, check, monkeypatch):
    folder = install()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("PYTHONPATH", path_of("package", "package/.installed"))
    assert check("fake", "-q")[0] == 0


# --- the plugin as a whole --------------------------------------------------------------------------------------------

OPTIONS = """
from attrs import field
@frozen(kw_only=True)
class Options:
    #: how often
    times: int = 1
    loud: bool = False  #: whether it is loud
    mute: int = 3
"""


@pytest.mark.parametrize(
    ("change", "claim", "message"),
    [
        pytest.param(
            ("import click", "import click, torch"), "discovery_is_light", "imports torch", marks=pytest.mark.slow
        ),
        (('summary="Say how it is."', 'summary="Say\\nhow"'), "summaries_are_one_line", "fake_one"),
        (('summary="Say how it is."', 'summary=""'), "summaries_are_one_line", "no summary"),
        (("build=Say)", "build=Say, options=Options)"), "options_are_documented", "nothing of mute"),
    ],
)
def test_what_lists_and_imports_need_is_checked(install, check, change, claim, message):
    install(COMMANDS.replace(*change).replace("class Say:", OPTIONS + "\nclass Say:"))
    code, out, _ = check("fake", "--claim", claim, "--json")
    assert code == 1
    found = claims_of(out, "plugin")[claim]
    assert found["outcome"] == "broken"
    assert message in found["message"]
    assert "times" not in found["message"]
    assert "loud" not in found["message"]


def test_metadata_is_checked(install, check):
    project = PROJECT.replace('"intarsia>=0.1"', '"intarsia-other"').replace("For tests.", "")
    install(project=project)
    code, out, _ = check("fake", "--claim", "metadata_is_complete")
    assert code == 1
    assert "it has no Summary; it does not require intarsia" in out


def test_a_plugin_that_is_not_there_is_refused_with_the_nearest(check):
    code, out, err = check("inflght")
    assert (code, out) == (2, "")
    assert err == "intarsia: error: no plugin 'inflght' is installed. Did you mean 'inflight'?\n"


@pytest.mark.parametrize("name", ["static", "scheduler.static"])
def test_who_names_a_part_is_told_whose_it_is(check, name):
    code, out, err = check(name)
    assert (code, out) == (2, "")
    assert err == (
        f"intarsia: error: no plugin {name!r} is installed; it is a part of 'defaults': "
        "intarsia plugins check defaults --part scheduler.static\n"
    )


def test_a_plugin_that_cannot_be_imported_is_named(install, check):
    install("import no_such_module_at_all")
    code, out, err = check("fake")
    assert (code, out) == (2, "")
    for word in ("'fake'", "fake-plugin 2.5", "no_such_module_at_all"):
        assert word in err


@pytest.mark.slow
def test_a_plugin_that_observes_alone_has_no_parts(install, check):
    install("from intarsia.hookspecs import hookimpl\n@hookimpl\ndef request_finished(output):\n    '''Counts.'''\n")
    code, out, _ = check("fake")
    assert code == 0
    assert len([line for line in out.splitlines() if not line.startswith(" ")]) == 2


@pytest.mark.parametrize("name", ["pytest", "hypothesis"])
def test_what_contracts_run_with_is_named_where_it_is_missing(check, monkeypatch, name):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda each: None if each == name else find_spec(each))
    code, out, err = check("inflight")
    assert (code, out) == (2, "")
    assert f"contracts run with {name}, which is not installed" in err
    assert "pip install 'intarsia[testing]'" in err


def test_options_of_the_list_are_not_taken_for_those_of_a_command(capsys):
    assert run(["plugins", "--json", "check", "inflight"]) == 2
    assert "for the list" in capsys.readouterr().err
    assert run(["plugins", "chekc", "inflight"]) == 2
    assert "Did you mean 'check'?" in capsys.readouterr().err


# --- suites -----------------------------------------------------------------------------------------------------------


def test_every_kind_of_part_has_a_suite():
    assert list(SUITES) == [kind.slot for kind in KINDS]
