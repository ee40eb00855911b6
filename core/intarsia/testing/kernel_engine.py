"""The claim about kernels in engines: a tiny random model is run on them, and on the references."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from intarsia.hookspecs import hookimpl
from intarsia.testing.claims import unclaimed
from intarsia.testing.kernel_case import KernelCase
from intarsia.testing.logits import prompt_logits
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Dtype, Provider

__all__ = ["EngineClaims"]

_KEY = "on_trial"
_PROMPT = (3, 41, 59, 26, 5, 35, 8, 9, 12, 33, 60)
#: How far logits may be off those of the references, as a share of their spread.
_SHARE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}


class EngineClaims(KernelCase):
    """What holds of a set of kernels in an engine."""

    def test_an_engine_runs_on_them(self) -> None:
        """A model gives the logits that it gives on the references, up to the dtype's rounding."""
        dtype = next(self.sets())[0]
        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_model(Path(folder) / "model")
            found, right = (self._logits(model, dtype, kernels) for kernels in ([_KEY, "torch"], ["torch"]))
        off, spread = float((found - right).abs().max()), float(right.std())
        assert bool(found.isfinite().all()), "logits are not finite"
        assert off <= _SHARE[dtype] * spread, f"logits in {dtype} are {off:.3g} off, and their spread is {spread:.3g}"

    def _logits(self, model: Path, dtype: Dtype, kernels: list[str]) -> torch.Tensor:
        from intarsia.engine import Engine

        asked: list[Any] = [{"use": _KEY, **self.options} if key == _KEY else key for key in kernels]
        engine = {"dtype": dtype, "device": self.device, "threads": 1, "max_model_len": 64}
        config = {"model": str(model), "engine": engine, "cache": {"memory": "4MiB"}, "kernels": asked}
        parts = {"attention": "eager", "runner": "eager"}
        offering = {_KEY: _Offering(evolve(self.provider(), key=_KEY))}
        with Engine.from_config(config | parts, plugins=offering) as made:
            if _KEY in kernels and not any(choice.source == _KEY for choice in made.parts.ops.choices.values()):
                unclaimed(f"it has no kernel for an op of a llama in {dtype}")
            together = prompt_logits(made, _PROMPT)
            one_by_one = prompt_logits(made, _PROMPT, chunk=1)
            return torch.cat((together, one_by_one)).cpu()


@frozen(eq=False)
class _Offering:
    """A plugin of this process."""

    provider: Provider

    @hookimpl
    def provide_kernels(self) -> list[Provider]:
        """The set on trial, under a key that nothing else has."""
        return [self.provider]
