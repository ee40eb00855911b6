"""Compiling at first use: what is kept, what is built anew, and what is said where nothing can be built."""

import multiprocessing
import os
import subprocess
import sys
import time

import pytest

from intarsia.errors import ConfigError, PluginError
from intarsia_cpu import build

SOURCE = '#include <omp.h>\nextern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with one source, small enough to compile at once, and a cache of its own."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "small.cpp").write_text(SOURCE % 42)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "cache"))
    build._load.cache_clear()
    yield folder
    build._load.cache_clear()


def libraries():
    return sorted(build.cache_folder("cpu").glob("*.so"))


def test_a_library_is_compiled_once_and_found_again(sources, caplog):
    caplog.set_level("INFO", "intarsia.cpu")
    assert build.load().answer() == 42
    assert "compiling the CPU kernels for" in caplog.text
    caplog.clear()
    build._load.cache_clear()
    assert build.load().answer() == 42
    assert not caplog.text and len(libraries()) == 1


def test_all_sources_are_one_library_and_a_broken_one_is_named(sources):
    (sources / "other.cpp").write_text(SOURCE.replace("answer", "other") % 7)
    library = build.load()
    assert library.answer() == 42 and library.other() == 7 and len(libraries()) == 1
    (sources / "broken.cpp").write_text("no C++")
    build._load.cache_clear()
    with pytest.raises(PluginError, match=r"cannot compile broken\.cpp"):
        build.load()
    assert len(libraries()) == 1


def test_what_takes_longest_begins_first():
    stems = [source.stem for source in build.sources()]
    assert set(stems[: len(build._LONG)]) == set(build._LONG)


def test_other_sources_headers_and_paths_are_other_libraries(sources, monkeypatch):
    build.load()
    (sources / "small.cpp").write_text(SOURCE % 43)
    build._load.cache_clear()
    assert build.load().answer() == 43
    (sources / "any.h").write_text("// new")
    build._load.cache_clear()
    build.load()
    monkeypatch.setenv(build.ISA_VARIABLE, "portable")
    build.load()
    assert len(libraries()) == (4 if build.supported()[0] != "portable" else 3)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "no digest", "digest of bytes that are no text"])
def test_a_damaged_library_is_built_anew(sources, damage):
    build.load()
    [library] = libraries()
    whole = library.read_bytes()
    digest = library.with_suffix(".sha256")
    library.unlink()  # the loaded one stays mapped
    if damage == "cut":
        library.write_bytes(whole[: len(whole) // 2])
    elif damage == "flipped":
        library.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    elif damage == "empty":
        library.write_bytes(b"")
    else:
        library.write_bytes(whole)
        digest.unlink() if damage == "no digest" else digest.write_bytes(b"\xff\xfe")
    build._load.cache_clear()
    assert build.load().answer() == 42
    assert build._intact(library)


def compile_once(folder, cache):
    build.SOURCES = folder
    os.environ[build.CACHE_VARIABLE] = cache
    return build.load().answer()


def test_processes_that_start_at_once_build_it_once(sources, monkeypatch, tmp_path):
    log = tmp_path / "calls"
    wrapper = tmp_path / "compiler"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo called >> {log}\nexec {build.compiler()} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        answers = pool.starmap(compile_once, [(sources, str(tmp_path / "cache"))] * 3)
    assert answers == [42] * 3
    assert log.read_text().split() == ["called"] * 2  # to compile, and to link


def test_only_the_last_used_libraries_are_kept(sources, monkeypatch):
    monkeypatch.setattr(build, "_KEPT", 2)
    for number in (1, 2, 3):
        (sources / "small.cpp").write_text(SOURCE % number)
        build._load.cache_clear()
        build.load()
        time.sleep(0.01)
    assert len(libraries()) == 2 and len(list(build.cache_folder("cpu").iterdir())) == 6


def test_no_compiler_is_said_with_what_to_install(sources, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "install g++ or set CXX" in build.unavailable()
    with pytest.raises(PluginError, match="install g"):
        build.load()


def test_a_compiler_that_fails_is_quoted(sources, monkeypatch, tmp_path):
    (sources / "small.cpp").write_text("int answer() { return nonsense; }")
    assert "small.cpp" in build.unavailable() and "nonsense" in build.unavailable()
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert str(broken) in build.unavailable()
    assert not libraries()


def test_a_folder_that_others_can_write_is_not_loaded_from(sources):
    build.cache_folder("cpu").mkdir(parents=True)
    build.cache_folder("cpu").chmod(0o777)
    assert "other users may write there" in build.unavailable()
    assert build.CACHE_VARIABLE in build.unavailable()


def test_a_folder_that_cannot_be_made_is_named(sources, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file"))
    assert str(tmp_path / "file") in build.unavailable()


def test_a_path_is_forced_by_name_and_refused_where_it_cannot_run(monkeypatch):
    monkeypatch.setenv(build.ISA_VARIABLE, "portable")
    assert build.isa() == "portable"
    monkeypatch.setenv(build.ISA_VARIABLE, "avx521")
    with pytest.raises(ConfigError, match="Did you mean 'avx512"):
        build.isa()
    monkeypatch.setattr(build, "_cpu", lambda: ("old", frozenset({"sse2"})))
    assert build.supported() == ("portable",)
    monkeypatch.setenv(build.ISA_VARIABLE, "avx2")
    with pytest.raises(ConfigError, match=r"needs avx2, f16c, fma, which this CPU lacks; it runs portable"):
        build.isa()


def test_the_cache_lies_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "own"))
    assert build.cache_folder("cpu") == tmp_path / "own" / "cpu"
    monkeypatch.delenv(build.CACHE_VARIABLE)
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder("cpu") == tmp_path / "intarsia" / "cpu"


def test_threads_are_torchs_own():
    # Two libraries of threads would fight over the cores.
    code = (
        "from intarsia_cpu import build; build.load();"
        "maps = open('/proc/self/maps').read().splitlines();"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line}))"
    )
    # In a process of its own: libraries of other tests bring theirs.
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
