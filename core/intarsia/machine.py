"""Facts of the machine that a composition rests on: devices, memory, cores, dtypes."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from intarsia.errors import CompositionError, ConfigError
from intarsia.types import AUTO, Dtype

#: Far beyond any machine; OpenMP ends the whole process where it cannot start its threads.
_MAX_THREADS = 1024

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def resolve_device(name: str) -> str:
    """Return the device that a config means: `auto` is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: not a device name.
        CompositionError: a device that this machine does not have.
    """
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    known = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]{0,5}))?", name)
    if known is None:
        raise ConfigError(f"engine.device: {name!r:.80} is not auto, cpu, cuda or cuda:1", field="engine.device")
    num_gpus = torch.cuda.device_count()
    if name != "cpu" and int(known[1] or 0) >= num_gpus:
        right = " or ".join(["cpu", *(f"cuda:{index}" for index in range(num_gpus))])
        raise CompositionError(
            f"engine.device: {name!r} is asked for and torch sees {num_gpus} GPUs; what works here: {right}",
            field="engine.device",
        )
    return name


def resolve_dtype(name: Dtype, device: str) -> Dtype:
    """Return the dtype that a config means: `auto` is bfloat16 where the device has bf16 dot products."""
    if name != AUTO:
        return name
    if device != "cpu":
        return "bfloat16"
    has_dot_products = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bfloat16" if has_dot_products() else "float32"


def resolve_threads(threads: int | None) -> int:
    """Return how many CPU threads to use: one a physical core, of those that this process may run on.

    Raises:
        ConfigError: more than a machine can start.
    """
    if threads is not None:
        if threads > _MAX_THREADS:
            raise ConfigError(f"engine.threads: {threads} is more than {_MAX_THREADS}", field="engine.threads")
        return threads
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    quota = min((quota for group in _groups("cpu") if (quota := _cpu_quota(group)) is not None), default=cores)
    return min(cores, quota)


def free_memory(device: str) -> int:
    """Return bytes that can be taken on a device now, within the container's limit where there is one."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    limits = [left for group in _groups("memory") if (left := _memory_left(group)) is not None]
    return min([int(psutil.virtual_memory().available), *limits])


def device_facts(device: str) -> dict[str, Any]:
    """Return what a GPU is, as plain data; empty for CPUs.

    Keys:
        name: of the device.
        capability: compute capability, such as `9.0`.
        sms: streaming multiprocessors.
        shared: bytes of shared memory of one of them.
        l2: bytes of the cache before memory.
        memory: bytes.
        bytes_per_s: of memory at its peak, clock x bus width x 2 for double data rate; None where it is not told.
    """
    if device == "cpu":
        return {}
    found = torch.cuda.get_device_properties(torch.device(device))
    # In kilohertz and bits. Drivers may say 0, and torch may not ask.
    clock, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "sms": found.multi_processor_count,
        "shared": found.shared_memory_per_multiprocessor,
        "l2": found.L2_cache_size,
        "memory": found.total_memory,
        "bytes_per_s": clock * 1e3 * 2 * width / 8 if clock > 0 and width > 0 else None,
    }


# --- containers -------------------------------------------------------------------------------------------------------


def _groups(controller: str, mount: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> list[Path]:
    """Return the folders of this process's control groups, v2 and v1, up to the root: each of them can set a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        # In a container the path can be the host's; then the root is the container's own group.
        folder = root / path.lstrip("/")
        folders += [each for each in (folder, *folder.parents) if each == root or root in each.parents]
    return folders


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not there, or `max`
        return None


def _memory_left(group: Path) -> int | None:
    """Return bytes left under a group's limit, or None where it has none; caches of files count as free."""
    for limit_file, used_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = _number(group / limit_file), _number(group / used_file)
        if limit is None or used is None:
            continue
        cached = 0
        with suppress(OSError, ValueError):
            figures = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(figures.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
        return max(0, limit - max(0, used - cached))
    return None


def _cpu_quota(group: Path) -> int | None:
    """Return how many CPUs' time a group may use, rounded up, or None where it has no quota."""
    try:
        quota, period = map(int, (group / "cpu.max").read_text().split())
    except (OSError, ValueError):
        quota, period = _number(group / "cpu.cfs_quota_us") or -1, _number(group / "cpu.cfs_period_us") or 0
    return -(-quota // period) if quota > 0 and period > 0 else None
