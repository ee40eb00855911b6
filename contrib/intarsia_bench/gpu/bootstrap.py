"""Run a GPU check from a bundle, with nothing but a Python that has torch and Triton: no network, no other package.

`python3 check.py` inside of a bundle, or `make gpu-check` in a checkout that has one. It makes an environment on top of
that Python's packages, installs the wheels that they lack, and runs the tests and the benchmark there. This file is
copied into the bundle, and imports the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Exit code where there is nothing to check on.
_REFUSED = 2


class RefusalError(Exception):
    """The check cannot run here; says what is missing."""


def find_device() -> None:
    """Raise RefusalError where torch sees no CUDA device, or is not there."""
    try:
        import torch
    except ImportError as error:
        raise RefusalError(
            f"no CUDA device: {sys.executable} has no torch ({error}); run it with a Python that has"
        ) from None
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = "torch is built without CUDA" if built is None else f"torch is built for CUDA {built} and finds no GPU"
        raise RefusalError(f"no CUDA device: {why} (torch {torch.__version__}, {sys.executable})")


def release(version: str) -> tuple[int, ...]:
    """Return the release of a version: `2.11.0+cu130` is (2, 11, 0)."""
    found = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def installed(name: str) -> str | None:
    """Return the version of a package that this Python sees, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacking(manifest: Mapping[str, Any], installed: Callable[[str], str | None] = installed) -> list[str]:
    """Return the files of the wheels to install: ours, those that are missing, and those that are too old."""
    files = []
    for wheel in manifest["wheels"]:
        have = installed(wheel["name"])
        if wheel["name"] == manifest["name"] or have is None or release(have) < release(wheel["minimum"]):
            files.append(wheel["file"])
    return files


def make_environment(folder: Path) -> Path:
    """Make an environment on top of this Python's packages; return its Python.

    An environment of an environment sees the packages of the outermost Python alone: a `.pth` file adds this one's.
    """
    subprocess.run(  # noqa: S603
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", "--clear", str(folder)], check=True
    )
    python = folder / "bin" / "python"
    purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}, scheme="venv"))
    outer = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # Behind the environment's own packages, with their `.pth` files, as if they were this Python's.
    lines = [f"import site; site.addsitedir({path!r})" for path in outer]
    (purelib / "outer_packages.pth").write_text("\n".join(lines) + "\n")
    return python


def install(bundle: Path, python: Path) -> list[str]:
    """Install what is lacking from a bundle; return the wheels' names.

    Raises:
        RefusalError: the bundle is none, or is made for another Python.
    """
    try:
        manifest = json.loads((bundle / "manifest.json").read_text())
    except OSError:
        raise RefusalError(f"{bundle} is no bundle: make one with `make gpu-bundle` where there is a network") from None
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if manifest["python"] != ours:
        raise RefusalError(
            f"the bundle is made for Python {manifest['python']}, and {sys.executable} is {ours}: "
            f"make gpu-bundle BUNDLE_PYTHON={ours}"
        )
    files = lacking(manifest)
    wheels = [str(bundle / "wheels" / file) for file in files]
    options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    # Those of the Python below are left where they are, and hidden by these.
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--ignore-installed"]
    subprocess.run([*pip, *options, *wheels], check=True)  # noqa: S603
    return files


def run(bundle: Path, out: Path, environment: Path) -> int:
    """Install a bundle into an environment and run the check there; return its exit code."""
    python = make_environment(environment)
    files = install(bundle, python)
    manifest = json.loads((bundle / "manifest.json").read_text())
    print(f"installed {len(files)} of {len(manifest['wheels'])} wheels")  # noqa: T201
    called = f"make gpu-check (bundle of {manifest['commit']})"
    command = [str(python), "-m", "intarsia_bench.gpu", "check", "--tests", str((bundle / "tests" / "gpu").resolve())]
    command += ["--out", str(out), "--called", called]
    return subprocess.run(command, check=False).returncode  # noqa: S603


def run_checkout(checkout: Path, out: Path) -> int:
    """Run the check with this Python, where it has the package already."""
    command = [sys.executable, "-m", "intarsia_bench.gpu", "check", "--tests", str(checkout / "tests" / "gpu")]
    return subprocess.run([*command, "--out", str(out)], check=False).returncode  # noqa: S603


def main(arguments: list[str] | None = None) -> int:
    """Check what the arguments name."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description="Run intarsia's tests and benchmark on this machine's GPU.")
    parser.add_argument("--bundle", type=Path, default=here, help="folder that `make gpu-bundle` made")
    parser.add_argument("--checkout", type=Path, help="run from here where there is no bundle")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the report")
    options = parser.parse_args(arguments)
    try:
        find_device()
        if not options.bundle.is_dir() and options.checkout is not None and installed("intarsia") is not None:
            return run_checkout(options.checkout.resolve(), options.out.resolve())
        with tempfile.TemporaryDirectory() as folder:
            return run(options.bundle.resolve(), options.out.resolve(), Path(folder) / "environment")
    except RefusalError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return _REFUSED
    except subprocess.CalledProcessError as error:
        print(f"{' '.join(map(str, error.cmd))} failed with {error.returncode}", file=sys.stderr)  # noqa: T201
        return 1


if __name__ == "__main__":
    sys.exit(main())
