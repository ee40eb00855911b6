"""Fused norms and activations beside a copy: each reads and writes its tensors once, so that bandwidth is its limit.

Shape legend: T tokens, E embed, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from intarsia.errors import CompositionError
from intarsia.ops import OPS
from intarsia.plugins import Registry
from intarsia.protocols import Kernel, PartContext
from intarsia.types import EngineOptions, Unfit
from intarsia_bench.gpu.setting import Emit, Setting
from intarsia_bench.gpu.timing import alternated, copying, random_like


def kernels_of(setting: Setting) -> dict[str, Kernel]:
    """Return the kernels under measurement by op, the first of each.

    Raises:
        IntarsiaError: there is no such part, or it does not fit.
    """
    offer = Registry.discover().find("kernels", setting.kernels)
    engine = EngineOptions(device=setting.device, dtype=setting.dtype, max_model_len=setting.context)  # type: ignore[arg-type]
    spec = setting.spec(setting.context)
    context = PartContext(options=offer.provider.options(), engine=engine, spec=spec, num_ids=setting.vocab)
    fit = offer.provider.fit(context)
    if isinstance(fit, Unfit):
        raise CompositionError(f"kernels: {setting.kernels!r} does not fit: {fit.reason}", field="kernels")
    found: dict[str, Kernel] = {}
    for kernel in offer.provider.build(context).kernels():
        if not kernel.dtypes or setting.dtype in kernel.dtypes:
            found.setdefault(kernel.op, kernel)
    return found


def _inputs(setting: Setting) -> dict[str, tuple[tuple[Any, ...], int]]:
    """Return op -> (arguments, bytes that it must read and write)."""
    rows, embed, ffn = setting.tokens, setting.embed_dim, setting.ffn_dim
    itemsize = setting.torch_dtype.itemsize
    x, residual = (random_like(setting, rows, embed) for _ in range(2))
    weight = random_like(setting, embed)
    # As long as the norms' tensors: a whole feed-forward's would take gigabytes.
    gate_up = random_like(setting, max(1, rows * embed // (2 * ffn)), 2 * ffn)
    wide = 3 * gate_up.numel() // 2 * itemsize
    return {
        "rms_norm": ((x, weight, 1e-6), 2 * rows * embed * itemsize),
        "add_rms_norm": ((x, residual, weight, 1e-6), 4 * rows * embed * itemsize),
        "silu_mul": ((gate_up,), wide),
        "gelu_tanh_mul": ((gate_up,), wide),
    }


def fused(setting: Setting, emit: Emit) -> None:
    """Measure each op, its torch reference and a copy in turn."""
    kernels = kernels_of(setting)
    copy, moved = copying(setting)
    for op, (arguments, num_bytes) in _inputs(setting).items():
        if op not in kernels:
            emit({"key": f"{op}_of_copy", "note": f"{setting.kernels} has no kernel for it"})
            continue
        ours: Callable[[], object] = partial(kernels[op].call, *arguments)
        reference: Callable[[], object] = partial(OPS[op].call, *arguments)
        works = {"ours": ours, "reference": reference, "copy": copy}
        with torch.inference_mode():
            seconds = alternated(works, setting.device, setting.rounds)
        rate, peak = num_bytes / seconds["ours"], moved / seconds["copy"]
        times = seconds["reference"] / seconds["ours"]
        note = f"{times:.1f} times torch's ops"
        emit(
            {"key": f"{op}_of_copy", "value": rate / peak, "measured": rate, "limit": peak, "unit": "B/s", "note": note}
        )
