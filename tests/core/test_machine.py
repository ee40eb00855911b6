"""Facts of the machine: devices, dtypes, threads and memory, inside containers too."""

from __future__ import annotations

import os
import types
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from intarsia import machine
from intarsia.errors import CompositionError, ConfigError
from intarsia.machine import device_facts, free_memory, resolve_device, resolve_dtype, resolve_threads
from intarsia.types import parse_bytes

GIB = 1 << 30


def with_gpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)


def test_auto_is_the_first_gpu_where_there_is_one(monkeypatch):
    with_gpus(monkeypatch, 0)
    assert resolve_device("auto") == "cpu"
    with_gpus(monkeypatch, 2)
    assert resolve_device("auto") == "cuda"


def test_a_device_is_taken_where_it_is_there(monkeypatch):
    with_gpus(monkeypatch, 2)
    assert [resolve_device(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1")] == ["cpu", "cuda", "cuda:0", "cuda:1"]


def test_a_gpu_that_is_not_there_is_refused_naming_those_that_are(monkeypatch):
    with_gpus(monkeypatch, 2)
    with pytest.raises(CompositionError, match=r"'cuda:2'.* 2 GPUs.*cpu or cuda:0 or cuda:1"):
        resolve_device("cuda:2")
    with_gpus(monkeypatch, 0)
    with pytest.raises(CompositionError, match=r"'cuda'.* 0 GPUs.*works here: cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize("name", ["meta", "mps", "gpu", "", "CPU", "cpu:0", "cuda:", "cuda:-1", "cuda: 1", "cuda:1\n"])
def test_what_is_no_device_names_what_is(name):
    with pytest.raises(ConfigError, match=r"engine\.device: .* is not auto, cpu, cuda or cuda:1") as caught:
        resolve_device(name)
    assert caught.value.field == "engine.device"


@pytest.mark.parametrize(("supported", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_dtype_follows_the_dot_products_of_the_cpu(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported, raising=False)
    assert resolve_dtype("auto", "cpu") == dtype
    assert resolve_dtype("auto", "cuda:1") == "bfloat16"
    assert resolve_dtype("float16", "cpu") == "float16"


# --- threads ----------------------------------------------------------------------------------------------------------


def on_machine(monkeypatch, *, cores: int | None, allowed: int, groups: list[Path] | None = None) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setattr(os, "cpu_count", lambda: 2 * cores if cores else None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)), raising=False)
    monkeypatch.setattr(machine, "_groups", lambda controller: groups or [])


@pytest.mark.parametrize(("cores", "allowed", "threads"), [(8, 16, 8), (8, 3, 3), (1, 1, 1), (None, 4, 1)])
def test_threads_are_the_physical_cores_that_this_process_may_use(monkeypatch, cores, allowed, threads):
    on_machine(monkeypatch, cores=cores, allowed=allowed)
    assert resolve_threads(None) == threads
    assert resolve_threads(7) == 7


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "garbage"}, 8),
        ({}, 8),
    ],
)
def test_threads_stay_within_a_containers_quota(monkeypatch, tmp_path, files, threads):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    on_machine(monkeypatch, cores=8, allowed=16, groups=[tmp_path])
    assert resolve_threads(None) == threads


def test_threads_beyond_any_machine_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.threads: 1025 is more than 1024"):
        resolve_threads(1025)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Lay out control groups: folder -> file -> content; `/proc/self/cgroup` is the text that is passed."""
    mount, own = tmp_path / "cgroup", tmp_path / "own"
    mount.mkdir()
    read = machine._groups

    def lay(membership: str, tree: dict[str, dict[str, object]]) -> None:
        own.write_text(membership)
        for folder, files in tree.items():
            (mount / folder).mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (mount / folder / name).write_text(f"{content}\n")

    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(machine, "_groups", lambda controller: read(controller, mount, own))
    return lay


def test_memory_is_what_the_machine_has_where_no_group_limits_it(groups):
    groups("0::/\n", {".": {"memory.max": "max", "memory.current": 5}})
    assert free_memory("cpu") == 64 * GIB
    groups("", {})
    assert free_memory("cpu") == 64 * GIB


def test_memory_stays_within_the_limit_of_the_group_less_what_is_used(groups):
    groups("0::/\n", {".": {"memory.max": 8 * GIB, "memory.current": 3 * GIB}})
    assert free_memory("cpu") == 5 * GIB


def test_files_in_the_page_cache_count_as_free(groups):
    stat = f"anon {GIB}\nactive_file {2 * GIB}\ninactive_file {GIB}\nother 7"
    groups("0::/a\n", {"a": {"memory.max": 4 * GIB, "memory.current": 4 * GIB, "memory.stat": stat}})
    assert free_memory("cpu") == 3 * GIB


def test_every_group_up_to_the_root_can_be_the_tightest(groups):
    unlimited, used = {"memory.max": "max", "memory.current": 0}, 1 * GIB
    tight = {"memory.max": 3 * GIB, "memory.current": used}
    loose = {"memory.max": 9 * GIB, "memory.current": used}
    groups("0::/slice/unit\n", {"slice": tight, "slice/unit": loose})
    assert free_memory("cpu") == 2 * GIB
    groups("0::/slice/unit\n", {"slice": unlimited, "slice/unit": loose})
    assert free_memory("cpu") == 8 * GIB


def test_the_groups_of_version_1_count_too(groups):
    files = {"memory.limit_in_bytes": 6 * GIB, "memory.usage_in_bytes": 5 * GIB}
    stat = f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    groups("4:cpu,memory:/docker/abc\n0::/\n", {"memory": files | {"memory.stat": stat}})
    assert free_memory("cpu") == 2 * GIB
    groups("4:memory:/\n", {"memory": {"memory.limit_in_bytes": 2**63 - 4096, "memory.usage_in_bytes": 5}})
    assert free_memory("cpu") == 64 * GIB


def test_a_group_over_its_limit_leaves_nothing_rather_than_less(groups):
    groups("0::/\n", {".": {"memory.max": GIB, "memory.current": 2 * GIB}})
    assert free_memory("cpu") == 0


def test_this_machines_memory_is_a_positive_number_within_what_is_there():
    assert 0 < free_memory("cpu") <= psutil.virtual_memory().total


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("123B", 123),
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("1.5kib", 1536),
        (" 3 TiB ", 3 << 40),
        ("0.1GiB", 107374182),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993.0", 9007199254740993),
        (str(2**63 - 1), 2**63 - 1),
    ],
)
def test_a_size_is_read_as_exactly_as_it_is_written(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GiB", "2 G", "2G", "2KK", "1iB", "-1", "+1", "1e9", "inf", "nan", "1_000", "0x10", ".5", "1."),
        *("1..5", "٣", "1,5GiB", "1 5", "2GiBs", "auto", str(2**63), "8388608TiB"),
        *("9" * 31, "9" * 10_000, "1." + "0" * 10_000),
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size such as 2GiB") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _h200(**changes):
    told = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "shared_memory_per_multiprocessor": 233472,
        "L2_cache_size": 50 << 20,
        "total_memory": 140 << 30,
        "memory_clock_rate": 3201000,
        "memory_bus_width": 6144,
    }
    return SimpleNamespace(**{name: value for name, value in (told | changes).items() if value is not ...})


def test_a_gpu_is_told_of_as_plain_data(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _h200(name=f"GPU {device.index}"))
    assert device_facts("cuda:1") == {
        "name": "GPU 1",
        "capability": "9.0",
        "sms": 132,
        "shared": 233472,
        "l2": 50 << 20,
        "memory": 140 << 30,
        "bytes_per_s": 3.201e9 * 2 * 768,
    }


@pytest.mark.parametrize("untold", [{"memory_clock_rate": 0}, {"memory_bus_width": 0}, {"memory_clock_rate": ...}])
def test_a_bandwidth_that_is_not_told_is_none(monkeypatch, untold):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _h200(**untold))
    assert device_facts("cuda")["bytes_per_s"] is None


def test_a_cpu_is_no_gpu():
    assert device_facts("cpu") == {}
