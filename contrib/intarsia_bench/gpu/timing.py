"""Timing on a device: medians over rounds in which the competitors take turns, so that a drift meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from intarsia_bench.gpu.setting import Setting

#: A sample runs a work again and again for about this long: the clock's grain and a launch are small beside it.
_SAMPLE_S = 0.02
_MOST = 200
_WARM_UPS = 3


def sample(work: Callable[[], object], device: str, times: int) -> float:
    """Return the seconds of one run, the mean of several in a row: by CUDA events, or by the clock on a CPU."""
    if torch.device(device).type == "cpu":
        start = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - start) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def alternated(works: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Return each work's median seconds over rounds; in every round each has its turn, in changing order."""
    times = {}
    for name, work in works.items():
        for _ in range(_WARM_UPS):
            once = sample(work, device, 1)
        times[name] = max(1, min(_MOST, int(_SAMPLE_S / max(once, 1e-9))))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for index in range(rounds):
        names = list(works) if index % 2 == 0 else list(works)[::-1]
        for name in names:
            seconds[name].append(sample(works[name], device, times[name]))
    return {name: statistics.median(values) for name, values in seconds.items()}


def copying(setting: Setting) -> tuple[Callable[[], object], int]:
    """Return a copy of a large buffer and the bytes that it moves: each is read and written."""
    source = torch.ones(setting.copy_bytes, dtype=torch.uint8, device=setting.device)
    return partial(torch.empty_like(source).copy_, source), 2 * setting.copy_bytes


def multiplying(setting: Setting) -> tuple[Callable[[], object], int]:
    """Return a large matrix product of random numbers and its operations; of zeros it would take less power."""
    size = setting.matrix
    a, b = (random_like(setting, size, size) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a)), 2 * size**3


def random_like(setting: Setting, *shape: int) -> torch.Tensor:
    """Return normal random numbers on the device."""
    return torch.randn(shape, dtype=setting.torch_dtype, device=setting.device)
