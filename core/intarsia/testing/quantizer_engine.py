"""Claims about quantizers in engines: a tiny random model is run with what they made, and with what that stands for."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from intarsia.hookspecs import hookimpl
from intarsia.protocols import PartContext, Quantizer
from intarsia.testing.claims import unclaimed
from intarsia.testing.logits import prompt_logits
from intarsia.testing.quantizer_case import QuantizerCase
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import DENSE, Provider, SamplingParams, Weight, dense

if TYPE_CHECKING:
    import torch

    from intarsia.engine import Engine

__all__ = ["EngineClaims"]

_KEY = "on_trial"
_PROMPT = (3, 41, 59, 26, 5, 35, 8, 9)


class EngineClaims(QuantizerCase):
    """What holds of a quantizer in an engine."""

    def test_an_engine_computes_with_what_it_made(self) -> None:
        """Answers and logits are, bit for bit, those of the model whose weights are the dequantized ones."""
        import torch

        with tempfile.TemporaryDirectory() as folder:
            model = save_tiny_model(Path(folder) / "model")
            (said, logits), (right, exact) = (self._run(model, each) for each in (self.provider(), self._plain()))
        off = float((logits - exact).abs().max())
        assert torch.equal(logits, exact), f"logits are {off:.3g} off those of the dequantized weights"
        assert said == right, f"it says {said}, and with the dequantized weights {right}"

    def _plain(self) -> Provider:
        """Return a provider of the dequantized weights, each made by a quantizer of its own."""
        provider = self.provider()

        def build(context: PartContext) -> Quantizer:
            return _Dequantizing(provider, context)

        return evolve(provider, build=build)

    def _run(self, model: Path, provider: Provider) -> tuple[Sequence[int], torch.Tensor]:
        """Return what an engine says, and its logits of a prompt."""
        from intarsia.engine import Engine

        config: dict[str, Any] = {
            "model": str(model),
            "engine": {"dtype": self.dtype, "device": "cpu", "threads": 1, "max_model_len": 64},
            "cache": {"memory": "4MiB"},
            "quantizer": {"use": _KEY, **self.options},
            "kernels": "torch",
            "attention": "eager",
            "runner": "eager",
        }
        engine: Engine
        with Engine.from_config(config, plugins={_KEY: _Offering(evolve(provider, key=_KEY))}) as engine:
            params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
            taken = {name for name, stored in engine.parts.weight_map.tensors.items() if len(stored.whole) == 2}
            if not any(engine.parts.quantizers[0].accepts(n, engine.parts.weight_map.tensors[n].whole) for n in taken):
                unclaimed("it takes no weight of a model with 32 and 64 columns")
            said = engine.generate([list(_PROMPT)], [params])[0].token_ids
            return said, prompt_logits(engine, [*_PROMPT, *said])


@frozen(eq=False)
class _Offering:
    """A plugin of this process."""

    provider: Provider

    @hookimpl
    def provide_quantizers(self) -> list[Provider]:
        """The quantizer on trial, under a key that nothing else has."""
        return [self.provider]


@frozen(eq=False)
class _Dequantizing:
    """Makes dense weights of what a quantizer makes, in the engine's dtype."""

    provider: Provider
    context: PartContext

    @property
    def _inner(self) -> Quantizer:
        built: Quantizer = self.provider.build(self.context)
        return built

    @property
    def format(self) -> str:
        return DENSE.name

    def accepts(self, name: str, shape: tuple[int, ...]) -> bool:
        return self._inner.accepts(name, shape)

    def num_bytes(self, name: str, shape: tuple[int, ...]) -> int:
        del name
        return shape[0] * shape[1] * (4 if self.context.engine.dtype == "float32" else 2)

    def quantize(self, name: str, weight: Weight) -> Weight:
        import torch

        made = self._inner.quantize(name, weight).dequantize()
        return dense(made.to(getattr(torch, self.context.engine.dtype)).contiguous())
