"""A Llama-3-8B-shaped model of random weights in an engine: decoding beside the bandwidth, and the host's share."""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from intarsia import Engine, Request, SamplingParams
from intarsia.errors import ExecutionError, IntarsiaError
from intarsia_bench.gpu import random_weights
from intarsia_bench.gpu.setting import Emit, Setting
from intarsia_bench.gpu.timing import alternated, copying
from intarsia_bench.limits import ModelCost

#: Steps that are run and not timed, after the prompts: graphs are captured, clocks rise.
_WARM_UPS = 6
#: Steps under the profiler.
_PROFILED = 8


def sizes(setting: Setting) -> dict[str, int]:
    """Return the model's sizes in transformers' spelling."""
    return {
        "hidden_size": setting.embed_dim,
        "intermediate_size": setting.ffn_dim,
        "num_hidden_layers": setting.layers,
        "num_attention_heads": setting.heads,
        "num_key_value_heads": setting.kv_heads,
        "head_dim": setting.head_dim,
        "vocab_size": setting.vocab,
        "max_position_embeddings": _max_len(setting),
    }


def _max_len(setting: Setting) -> int:
    return setting.context + setting.steps + _WARM_UPS + _PROFILED + 8


def open_engine(setting: Setting, folder: Path, **sections: Any) -> Engine:
    """Make an engine of random weights; parts are left to composition but for what `sections` says.

    Raises:
        IntarsiaError: it cannot be composed.
    """
    config = {
        "model": {"use": str(random_weights.save_config(folder, **sizes(setting))), "loader": "random"},
        "engine": {"device": setting.device, "dtype": setting.dtype, "max_model_len": _max_len(setting), "seed": 0},
        "cache": {"memory": setting.cache_memory},
        "scheduler": {"use": "inflight", "max_batch": setting.batch, "max_tokens": 8192},
        **sections,
    }
    return Engine.from_config(config, plugins=[random_weights])


@frozen
class Decoding:
    """What decode steps of a full batch took.

    Attributes:
        seconds: of a step by the clock, the median.
        busy: of a step in which the device ran something; None where that is not known.
        context: tokens that a row saw, on average.
    """

    seconds: float
    busy: float | None
    context: float


def decode(engine: Engine, setting: Setting, batch: int, prompt: int) -> Decoding:
    """Run a batch of random prompts until all decode, then time steps in which every row gets one token.

    Raises:
        ExecutionError: a request failed.
    """
    rng = random.Random(batch)  # noqa: S311
    wanted = _WARM_UPS + setting.steps + _PROFILED + 2
    params = SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True, seed=0)
    names = [f"gpu-{index}" for index in range(batch)]
    for name in names:
        ids = [rng.randrange(setting.vocab) for _ in range(prompt)]
        engine.add(Request(request_id=name, prompt=ids, params=params))
    started: set[str] = set()
    while len(started) < batch:
        started |= {output.request_id for output in _step(engine) if output.token_ids}
    for _ in range(_WARM_UPS):
        _step(engine)
    times = []
    for _ in range(setting.steps):
        start = time.perf_counter()
        _step(engine)
        _wait(setting)
        times.append(time.perf_counter() - start)
    context = prompt + _WARM_UPS + setting.steps / 2
    busy = _busy(engine, setting)
    for name in names:
        engine.cancel(name)
    while engine.has_work:
        engine.step()
    return Decoding(statistics.median(times), busy, context)


def _step(engine: Engine) -> Sequence[Any]:
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise ExecutionError(f"{output.request_id}: {output.error}")
    return outputs


def _wait(setting: Setting) -> None:
    if torch.device(setting.device).type == "cuda":
        torch.cuda.synchronize()


def _busy(engine: Engine, setting: Setting) -> float | None:
    """Return the seconds of a step in which the device ran a kernel or a copy, by CUPTI; None on other devices."""
    if torch.device(setting.device).type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_PROFILED):
            _step(engine)
        _wait(setting)
    ranges = [event.time_range for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return covered([(times.start, times.end) for times in ranges]) / 1e6 / _PROFILED


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return how much of a line intervals (start, end) cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def bytes_of_a_step(cost: ModelCost, batch: int, context: float) -> float:
    """Return what a decode step must read: the weights once, and each row's keys and values."""
    return cost.weight_bytes + batch * context * sum(layer.num_bytes for layer in cost.layers)


#: What the two ways of running are called in figures -> the sections of a config that ask for them.
_WAYS: Mapping[str, Mapping[str, Any]] = {"": {}, "graphs_": {"runner": "cuda_graph"}}


def llama(setting: Setting, emit: Emit) -> None:
    """Measure decoding at batch 1 and at the target's: as composed by itself, then with graphs where that has none."""
    chosen = ""
    for prefix, sections in _WAYS.items():
        if sections.get("runner") == chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                start = time.perf_counter()
                engine = open_engine(setting, Path(folder), **sections)
            except IntarsiaError as error:
                if not prefix:
                    raise
                emit({"key": f"{prefix}not_composed", "note": str(error)})
                continue
            chosen = engine.parts.selection("runner").provider.key
            with engine:
                emit({"key": f"{prefix}load", "value": time.perf_counter() - start, "unit": "s"})
                _engine_figures(engine, setting, prefix, emit)
        # The next one's weights have the memory of this one's.
        del engine
        gc.collect()
        if torch.device(setting.device).type == "cuda":
            torch.cuda.empty_cache()


def _engine_figures(engine: Engine, setting: Setting, prefix: str, emit: Emit) -> None:
    parts = engine.parts
    emit({"key": f"{prefix}parts", "note": ", ".join(f"{s.slot} {s.provider.key}" for s in parts.selections)})
    cost = ModelCost.of(parts)
    copy, moved = copying(setting)
    peak = moved / alternated({"copy": copy}, setting.device, setting.rounds)["copy"]
    for batch, prompt in ((1, setting.prompt), (setting.batch, setting.context)):
        name = f"{prefix}decode{'1' if batch == 1 else '64'}"
        found = decode(engine, setting, batch, prompt)
        rate = bytes_of_a_step(cost, batch, found.context) / found.seconds
        emit({"key": f"{name}_of_bandwidth", "value": rate / peak, "measured": rate, "limit": peak, "unit": "B/s"})
        emit({"key": f"{name}_tokens_per_s", "value": batch / found.seconds, "unit": "tokens/s"})
        if found.busy is not None:
            share = max(0.0, 1 - found.busy / found.seconds)
            emit({"key": f"{name}_host_share", "value": share, "measured": found.seconds - found.busy, "unit": "s"})
