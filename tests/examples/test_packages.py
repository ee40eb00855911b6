"""The packages in `examples/` as users get them: wheels, installed beside ours in a fresh environment.

The environment has nothing of its own but these wheels. What they depend on it finds where this suite's own Python
does, behind its own packages; pip fetches what is missing there, within constraints.txt.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import attrs
import pytest

from example_packages import PACKAGES, ROOT, SLOTS
from intarsia.hookspecs import kind_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def pip(*arguments):
    subprocess.run([sys.executable, "-m", "pip", *map(str, arguments), "--quiet"], check=True, timeout=600)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build our wheel and those of the packages, from copies: nothing is left in the source folders."""
    folder = tmp_path_factory.mktemp("wheels")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, *PACKAGES.values())
    return sorted(folder.glob("*.whl"))


@attrs.frozen
class Environment:
    """A fresh environment, used from an empty folder."""

    folder: Path
    python: Path

    def run(self, *command, timeout=600, **variables):
        """Run a Python command there; return its output."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
        environ |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
        done = subprocess.run(
            [self.python, *map(str, command)],
            capture_output=True, text=True, cwd=self.folder, env=environ, timeout=timeout, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout


@pytest.fixture(scope="module")
def environment(wheels, tmp_path_factory):
    """Install the wheels."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv/bin/python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")}))
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (own / "borrowed.pth").write_text("".join(f"{path}\n" for path in paths))
    wanted = [f"{wheel.name.split('-')[0]}[testing] @ {wheel.as_uri()}" for wheel in wheels if is_ours(wheel)]
    wanted += [wheel for wheel in wheels if not is_ours(wheel)]
    install = ("--python", python, "install", "--constraint", ROOT / "constraints.txt")
    pip(*install, *wanted)
    return Environment(folder, python)


def is_ours(wheel):
    return wheel.name.startswith("intarsia-")


def test_the_wheels_hold_their_package_and_nothing_else(wheels):
    import zipfile

    assert len(wheels) == 1 + len(PACKAGES)
    for wheel in wheels:
        if not is_ours(wheel):
            tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
            package = wheel.name.split("-")[0]
            assert {top for top in tops if not top.endswith(".dist-info")} == {package}


def test_they_are_listed_with_their_distributions(environment):
    rows = json.loads(environment.run("-m", "intarsia", "plugins", "--json"))
    listed = {(row["plugin"], row["hook"], row["key"]): row["distribution"] for row in rows}
    for key, folder in PACKAGES.items():
        assert listed[key, kind_of(SLOTS[key]).hook, key] == folder.name


@pytest.mark.parametrize("key", PACKAGES)
def test_its_own_tests_pass(environment, key):
    folder = environment.folder / f"tests-{key}"
    shutil.copytree(PACKAGES[key] / "tests", folder)
    said = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder)
    assert " passed" in said


@pytest.mark.parametrize("key", PACKAGES)
def test_its_part_keeps_the_contract_of_its_kind(environment, key):
    report = json.loads(environment.run("-m", "intarsia", "plugins", "check", key, "--json"))
    assert report["ok"] and report["distribution"] == PACKAGES[key].name
    (part,) = (each for each in report["parts"] if each["part"] == f"{SLOTS[key]}.{key}")
    outcomes = [claim["outcome"] for claim in part["claims"]]
    assert outcomes.count("kept") > 10 and set(outcomes) <= {"kept", "skipped"}


def test_an_engine_says_the_same_with_all_of_them(environment):
    found = json.loads(environment.run(ROOT / "tests/example_engines.py").splitlines()[-1])
    assert all(Path(home).is_relative_to(environment.folder) for home in found["home"])
    answers, nll = found["answers"], found["nll"]
    assert answers["parts"] == answers["plain"]
    assert answers["all"] == answers["nf4"]
    assert found["drafts"]["parts"] > 0
    assert abs(nll["parts"] - nll["plain"]) < 1e-6
    assert abs(nll["all"] - nll["nf4"]) < 1e-6
    assert abs(nll["nf4"] - nll["plain"]) < 0.15  # nats a token, of a perplexity near 10
