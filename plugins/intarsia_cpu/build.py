"""Compiles the C++ kernels at first use and keeps the result.

One shared library of all of `src/*.cpp`, for the CPU at hand, in the user's cache folder. Its sources are compiled side
by side. The key of a library is the digest of all its sources, the flags, the compiler and the CPU, so nothing stale is
ever found. Beside a library lies its own digest: one that is damaged is built anew. A lock makes processes that start
at once build it once.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess  # the compiler is found on PATH and its arguments are our own
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

from attrs import frozen

from intarsia.errors import ConfigError, PluginError, did_you_mean
from intarsia.folders import CACHE_VARIABLE, cache_folder

logger = logging.getLogger("intarsia.cpu")

#: Forces a path of `PATHS`.
ISA_VARIABLE = "INTARSIA_CPU_ISA"
SOURCES = Path(__file__).with_name("src")
#: What takes longest to compile, which begins first.
_LONG = ("abi_attention", "integer_tiles", "float_tiles")
#: Libraries kept; the ones that have not been used for longest go.
_KEPT = 8
_TIMEOUT_S = 300
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",  # products and sums are fused where the source says so, in every instance of a template alike
    "-Wno-psabi",
)


@frozen
class IsaPath:
    """One way to compile: what it needs of the CPU (as Linux names it) and what it tells the compiler."""

    needs: frozenset[str]
    flags: tuple[str, ...]


def _x86(*names: str) -> IsaPath:
    # Linux and the compilers spell a few features in two ways.
    spelled = {"avx512_bf16": "avx512bf16", "avx512_vnni": "avx512vnni", "avx_vnni": "avxvnni"}
    return IsaPath(frozenset(names), tuple(f"-m{spelled.get(name, name)}" for name in names))


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
#: Best first. `portable` runs everywhere.
PATHS: Mapping[str, IsaPath] = {
    "avx512_bf16": _x86(*_AVX512, "avx512_vnni", "avx512_bf16"),
    "avx512_vnni": _x86(*_AVX512, "avx512_vnni"),
    "avx512": _x86(*_AVX512),
    "avx2_vnni": _x86(*_AVX2, "avx_vnni"),
    "avx2": _x86(*_AVX2),
    "portable": IsaPath(frozenset(), ()),
}


@functools.cache
def _cpu() -> tuple[str, frozenset[str]]:
    """The CPU's model and features; no features where the system does not list them."""
    model, features = f"{platform.machine()} {platform.processor()}", frozenset[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() == "flags":
                return model, frozenset(value.split())
    return model, features


def supported() -> tuple[str, ...]:
    """Names of the paths that this CPU runs, best first."""
    _, features = _cpu()
    return tuple(name for name, path in PATHS.items() if path.needs <= features)


def isa() -> str:
    """Return the path in use: the best, or the one that INTARSIA_CPU_ISA names.

    Raises:
        ConfigError: it names none, or one that this CPU does not run.
    """
    runs = supported()
    name = os.environ.get(ISA_VARIABLE, "") or runs[0]
    if name not in PATHS:
        raise ConfigError(f"{ISA_VARIABLE}: there is no path {name!r}.{did_you_mean(name, PATHS)}", field=ISA_VARIABLE)
    if name not in runs:
        lacking = ", ".join(sorted(PATHS[name].needs - _cpu()[1]))
        raise ConfigError(
            f"{ISA_VARIABLE}: {name!r} needs {lacking}, which this CPU lacks; it runs {', '.join(runs)}",
            field=ISA_VARIABLE,
        )
    return name


def compiler() -> str | None:
    """Return the path of the C++ compiler: CXX, g++, c++ or clang++, the first that is there."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def unavailable() -> str | None:
    """Return why the kernels cannot be had here, for `fit`, or None. Compiles them where that is still to do."""
    try:
        load()
    except PluginError as error:
        return str(error)
    return None


def load() -> ctypes.CDLL:
    """Return the library of all kernels, compiled if it has not been yet.

    Raises:
        PluginError: there is no compiler, or it fails, or the cache folder cannot be used; says what to do.
        ConfigError: INTARSIA_CPU_ISA names no path of this CPU.
    """
    return _load(isa(), cache_folder("cpu"))


@functools.cache
def _load(path: str, folder: Path) -> ctypes.CDLL:
    # torch brings libgomp, under the name that ours asks for: with it in first, both share one pool of threads.
    import torch  # noqa: F401

    if sys.platform == "win32":
        raise PluginError("CPU kernels are compiled on Linux and macOS; there is no build of them for Windows")
    command = compiler()
    if command is None:
        raise PluginError("CPU kernels need a C++ compiler, and there is none on PATH; install g++ or set CXX to one")
    try:
        _prepare(folder)
        build = _Build(path, folder, command)
        with build.locked():
            if not _intact(build.library):
                _compile(build)
                _prune(folder)
            os.utime(build.library)
            return ctypes.CDLL(str(build.library))
    except OSError as error:
        raise PluginError(
            f"CPU kernels cannot be kept in {folder}: {error}; set {CACHE_VARIABLE} to a folder of your own"
        ) from error


@frozen
class _Build:
    """One path's library: where it lies, and how it is made."""

    path: str
    folder: Path
    compiler: str

    @property
    def command(self) -> tuple[str, ...]:
        return (self.compiler, *_FLAGS, *PATHS[self.path].flags, *_tuning(self.path))

    @property
    def library(self) -> Path:
        return self.folder / f"{self.path}-{_key(self.command)}.so"

    def locked(self) -> contextlib.AbstractContextManager[None]:
        return _locked(self.folder / f"{self.library.name}.lock")


def sources() -> list[Path]:
    """Return what there is to compile; what takes longest first."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda source: (source.stem not in _LONG, source.name))


def _tuning(path: str) -> tuple[str, ...]:
    # Other machines than x86 have no paths of their own: the compiler is told to use what it finds.
    if platform.machine().lower() in {"x86_64", "amd64", "i686"}:
        if not path.startswith("avx512"):
            return ()
        # It expands 2:4 sparse weights; `avx512` itself does without, so that the other way is tested too.
        expands = path != "avx512" and "avx512_vbmi2" in _cpu()[1]
        return ("-mprefer-vector-width=512", *(("-mavx512vbmi2",) if expands else ()))
    return ("-mcpu=native",)


def _key(command: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for part in (*command[1:], _version(command[0]), _cpu()[0]):
        digest.update(part.encode() + b"\0")
    for file in (*sources(), *sorted(SOURCES.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:24]


@functools.cache
def _version(command: str) -> str:
    try:
        done = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        raise PluginError(
            f"CPU kernels: the compiler {command} does not run: {error}; set CXX to one that does"
        ) from error
    return f"{command} {done.stdout}"


def _prepare(folder: Path) -> None:
    """Make the folder, for this user alone: what lies in it is loaded as code."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise PermissionError("it belongs to another user")
    if status.st_mode & 0o022:
        raise PermissionError("other users may write there")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _intact(library: Path) -> bool:
    """Whether the library is there and is what was built."""
    try:
        return _digest_of(library).read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _compile(build: _Build) -> None:
    logger.info("compiling the CPU kernels for %s: some seconds, once", build.path)
    started = perf_counter()
    with tempfile.TemporaryDirectory(dir=build.folder, prefix="build-") as scratch:

        def compiled(source: Path) -> str:
            made = f"{scratch}/{source.stem}.o"
            _run(build, source.name, *build.command, "-c", "-o", made, str(source))
            return made

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(compiled, sources()))
        built = Path(scratch) / "built.so"
        _run(build, "its objects", *build.command, "-shared", "-o", str(built), *objects)
        digest = Path(scratch) / "digest"
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        # A library without its digest counts as damaged, so either order is safe.
        built.replace(build.library)
        digest.replace(_digest_of(build.library))
    logger.info("compiled the CPU kernels in %.1f s", perf_counter() - started)


def _run(build: _Build, what: str, *command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)  # noqa: S603
    except (subprocess.SubprocessError, OSError) as error:
        raise PluginError(f"CPU kernels: {build.compiler} cannot compile {what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first lines of what a compiler complained about."""
    said = (getattr(error, "stderr", None) or "").splitlines()
    return " / ".join([line for line in said if "error" in line][:3] or said[:3]) or str(error)


def _prune(folder: Path) -> None:
    libraries = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        for file in (library, _digest_of(library), library.with_name(f"{library.name}.lock")):
            file.unlink(missing_ok=True)
