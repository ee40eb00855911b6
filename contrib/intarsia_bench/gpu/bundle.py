"""Make a bundle: all that a GPU machine without a network lacks, to run `tests/gpu` and the benchmark.

`python -m intarsia_bench.gpu.bundle` writes our wheel, the wheels of its dependencies for the machine's Python (torch
and Triton are there already), the tests, and `check.py`, into a folder. Versions are those that are installed here.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from intarsia.errors import ConfigError

NAME = "intarsia"
#: What the machine brings.
PROVIDED = frozenset({"torch", "triton"})
#: What tests need, beside our own dependencies. The peer, transformers, would not fit: it is used where it is there.
EXTRAS = ("hypothesis", "pytest", "pytest-timeout")
#: Bytes that a whole bundle may have.
LIMIT = 60_000_000
#: What of the checkout goes along.
_TESTS = ("conftest.py", "attending.py", "engines.py", "families.py", "integer_weights.py", "models.py")
_TEST_FOLDERS = ("gpu", "triton")
#: pip takes each platform's name literally; newer ones run wheels of older ones.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(35, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]


def target(python: str) -> dict[str, str]:
    """Return the environment markers of the machine."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "os_name": "posix",
        "extra": "",
    }


def needed(requirements: Iterable[str], environment: Mapping[str, str]) -> list[Requirement]:
    """Return those of some requirements that the machine has need of, without what it brings."""
    found = []
    for text in requirements:
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate(dict(environment))
        if applies and canonicalize_name(requirement.name) not in PROVIDED:
            found.append(requirement)
    return found


def lowest(requirement: Requirement) -> Version:
    """Return the oldest version that a requirement allows, as far as it says so."""
    bounds = [Version(s.version.removesuffix(".*")) for s in requirement.specifier if s.operator in (">=", "==", "~=")]
    return max(bounds, default=Version("0"))


def closure(environment: Mapping[str, str]) -> dict[str, tuple[str, Version]]:
    """Return all that is needed, by name: the version that is installed here, and the oldest that would do.

    Raises:
        ConfigError: something of it is not installed here.
    """
    open_ = [Requirement(name) for name in EXTRAS] + needed(importlib.metadata.requires(NAME) or [], environment)
    found: dict[str, tuple[str, Version]] = {}
    while open_:
        requirement = open_.pop()
        name = canonicalize_name(requirement.name)
        seen = name in found
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{name} is needed there and not installed here: run `make setup`") from None
        before = found[name][1] if seen else Version("0")
        found[name] = version, max(before, lowest(requirement))
        if not seen:
            open_ += needed(importlib.metadata.requires(name) or [], environment)
    return found


def wheel_requirements(wheel: Path) -> list[str]:
    """Return what a wheel's metadata says that it requires."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        fields = HeaderParser().parsestr(archive.read(name).decode())
    return [str(value) for value in fields.get_all("Requires-Dist") or []]


def missing(wheels: Sequence[Path], environment: Mapping[str, str]) -> list[str]:
    """Return what wheels require and is neither among them, in a version that will do, nor brought by the machine."""
    versions = {name: version for name, version, *_ in (parse_wheel_filename(wheel.name) for wheel in wheels)}
    lines = []
    for wheel in wheels:
        for requirement in needed(wheel_requirements(wheel), environment):
            version = versions.get(canonicalize_name(requirement.name))
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                lines.append(f"{wheel.name} requires {requirement}; the bundle has {version}")
    return lines


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)  # noqa: S603


def _commit(source: Path) -> str:
    """Return the checkout's commit, `unknown` where it is none; a `+` says that files differ from it."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)  # noqa: S603
    return found.stdout.strip() or "unknown"


def collect_wheels(source: Path, folder: Path, python: str) -> list[dict[str, str]]:
    """Put our wheel and those of its dependencies into a folder; return the manifest's entries."""
    needs = closure(target(python))
    _pip("wheel", "-qq", "--no-deps", "--wheel-dir", str(folder), str(source))
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    pins = [f"{name}=={version}" for name, (version, _) in sorted(needs.items())]
    options = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
    _pip("download", "-qq", *options, "--dest", str(folder), *pins)
    entries = []
    for wheel in sorted(folder.glob("*.whl")):
        name, version, *_ = parse_wheel_filename(wheel.name)
        minimum = str(needs[name][1]) if name in needs else str(version)
        entries.append({"name": str(name), "version": str(version), "minimum": minimum, "file": wheel.name})
    return entries


def make(source: Path, folder: Path, python: str) -> list[dict[str, str]]:
    """Make a bundle of a checkout in a folder, anew; return what wheels it has.

    Raises:
        ConfigError: something is not installed here, would be missing there, or the bundle is too large.
        CalledProcessError: pip finds no wheel.
    """
    shutil.rmtree(folder, ignore_errors=True)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    entries = collect_wheels(source, wheels, python)
    if lines := missing(sorted(wheels.glob("*.whl")), target(python)):
        raise ConfigError("the bundle is not complete: " + "; ".join(lines))
    copy_tests(source, folder)
    shutil.copy(Path(__file__).with_name("bootstrap.py"), folder / "check.py")
    manifest = {"name": NAME, "commit": _commit(source), "python": python, "wheels": entries}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    check_size(folder)
    return entries


def copy_tests(source: Path, folder: Path) -> None:
    """Copy what `tests/gpu` needs, and the settings of pytest."""
    shutil.copy(source / "pyproject.toml", folder)
    (folder / "tests").mkdir()
    for name in _TESTS:
        shutil.copy(source / "tests" / name, folder / "tests")
    for name in _TEST_FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source / "tests" / name, folder / "tests" / name, ignore=ignored)


def size_of(folder: Path) -> int:
    """Return the bytes of all files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_size(folder: Path, limit: int = LIMIT) -> None:
    """Raise ConfigError, with the largest wheels, where a bundle has more bytes than it may."""
    size = size_of(folder)
    if size <= limit:
        return
    largest = sorted(folder.glob("wheels/*.whl"), key=lambda path: -path.stat().st_size)[:5]
    listed = ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in largest)
    raise ConfigError(f"the bundle has {size / 1e6:.1f} MB, more than {limit / 1e6:.0f}; the largest: {listed}")


def main(arguments: list[str] | None = None) -> int:
    """Make the bundle that the arguments describe."""
    parser = argparse.ArgumentParser(description="Pack all that a GPU machine without a network lacks.")
    parser.add_argument("--source", type=Path, default=Path(), help="the checkout")
    parser.add_argument("--out", type=Path, default=Path("dist/gpu-bundle"))
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    options = parser.parse_args(arguments)
    try:
        entries: Sequence[Mapping[str, Any]] = make(options.source.resolve(), options.out, options.python)
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(f"{options.out}: {len(entries)} wheels for Python {options.python}, {size_of(options.out) / 1e6:.1f} MB")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
