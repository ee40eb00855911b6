"""The same model in transformers: greedy `generate` with SDPA and a static cache, as a peer of our decoding."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch
from attrs import Factory, frozen

from intarsia_bench.gpu.llama import sizes
from intarsia_bench.gpu.random_weights import llama_config
from intarsia_bench.gpu.setting import Emit, Setting


@frozen
class _Clock:
    """A stopping criterion of `generate` that stops nothing: it notes when each token was chosen."""

    times: list[float] = Factory(list)

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        del scores
        if ids.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def transformers_decode(setting: Setting, emit: Emit) -> None:
    """Time the decode steps of a full batch.

    First as it runs by itself op by op, then compiled, which transformers does on GPUs: each figure is told when it is
    known, since compiling can outlast the part's time. The better one counts.
    """
    import transformers

    emit({"key": "transformers_version", "note": transformers.__version__})
    fields = {key: value for key, value in llama_config(**sizes(setting)).items() if key != "model_type"}
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**fields), dtype=setting.torch_dtype, attn_implementation="sdpa"
        ).eval()
        ids = torch.randint(setting.vocab, (setting.batch, setting.context))
    best = 0.0
    for note, compiled in (("op by op", False), ("compiled", True)):
        rate = _rate(model, ids, setting, compiled=compiled)
        if rate > best:
            best = rate
            emit({"key": "transformers_tokens_per_s", "value": rate, "unit": "tokens/s", "note": note})


def _rate(model: Any, ids: torch.Tensor, setting: Setting, *, compiled: bool) -> float:
    """Return tokens a second of the whole batch while it decodes, from the median step of a second run."""
    from transformers import StoppingCriteriaList

    clock = _Clock()
    for _ in range(2):
        clock = _Clock()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=setting.steps + 1,
                eos_token_id=None,
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=not compiled,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
    steps = [after - before for before, after in itertools.pairwise(clock.times)]
    return len(ids) / statistics.median(steps)
