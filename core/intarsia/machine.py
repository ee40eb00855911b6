"""Facts of the machine that a composition rests on: devices, memory, cores, dtypes."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from intarsia.errors import CompositionError, ConfigError
from intarsia.types import AUTO, Dtype


def resolve_device(name: str) -> str:
    """Return the device that a config means: `auto` is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: not a device name.
        CompositionError: a device that this machine does not have.
    """
    if name == AUTO:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"engine.device: {name!r} is not auto, cpu, cuda or cuda:1", field="engine.device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device: {name!r} is not auto, cpu, cuda or cuda:1", field="engine.device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CompositionError(
            f"engine.device: {name!r} is asked for and torch sees {torch.cuda.device_count()} GPUs; 'cpu' works here",
            field="engine.device",
        )
    return str(device)


def resolve_dtype(name: Dtype, device: str) -> Dtype:
    """Return the dtype that a config means: `auto` is bfloat16 where the device has bf16 dot products."""
    if name != AUTO:
        return name
    if device != "cpu":
        return "bfloat16"
    has_dot_products = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return "bfloat16" if has_dot_products() else "float32"


def resolve_threads(threads: int | None) -> int:
    """Return how many CPU threads to use: one a physical core that this process may run on."""
    if threads is not None:
        return threads
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores


def free_memory(device: str) -> int:
    """Return bytes that can be taken on a device now, within the container's limit where there is one."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return min(int(psutil.virtual_memory().available), _container_memory())


def _container_memory() -> int:
    """Bytes left under the cgroup's limit (v2), or a number beyond any machine's."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        return int(limit) - int((group / "memory.current").read_text()) if limit != "max" else 2**63
    except (OSError, ValueError):
        return 2**63
