"""How a runner's contract runs it: by hand, over cache tensors of its own, against the ops run one by one in fp32.

Shape legend: T tokens, E embed, V vocab, K kv heads, D head dim.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import define, evolve, field, frozen

from intarsia.protocols import CacheStorage, Executor, ExecutorContext, Parts, PreparingRunner, Runner
from intarsia.testing.composing import KEY, composed, offered, temporary_folder
from intarsia.testing.leftovers import calling
from intarsia.testing.planned import no_progress
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import BatchPlan, Provider, Row, StepResult

if TYPE_CHECKING:
    import torch

    from intarsia.types import ForwardBatch

__all__ = ["LENGTHS", "MODELS", "RunnerCase", "RunnerTrial", "model_of", "token_ids"]

#: Of sequences, in tokens: they end before a page does, with it, and behind it.
LENGTHS: tuple[int, ...] = (1, 2, 15, 16, 17, 33, 5)
#: Sizes of tiny models: round ones, heads that share keys and values, sizes that no vector divides, and a window.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "even": {"layers": 3},
    "grouped": {"heads": 4, "kv_heads": 2, "head_dim": 8},
    "odd": {"num_ids": 71, "hidden": 40, "heads": 5, "head_dim": 10, "ffn": 33, "biases": True},
    "window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6},
}
#: Slots of a trial's cache, and tokens of its longest sequence.
_NUM_SLOTS, _MOST = 640, 60


@cache
def model_of(name: str) -> Path:
    """Return the folder of one of `MODELS`."""
    return save_tiny_model(temporary_folder() / name, **MODELS[name])


def token_ids(number: int) -> list[int]:
    """Return the ids of the sequence of this number, as many as any of the suite's runs."""
    rng = random.Random(number)
    return [rng.randrange(64) for _ in range(_MOST)]


@frozen
class _Held(Executor):
    """Stands for an executor, and keeps what one is built from."""

    context: ExecutorContext
    depth: int = 1

    def start(self, progress: Any) -> None:
        del progress
        raise AssertionError("the suite drives the runner by hand")

    def submit(self, plan: BatchPlan) -> None:
        del plan
        raise AssertionError("the suite drives the runner by hand")

    def collect(self) -> StepResult:
        raise AssertionError("the suite drives the runner by hand")

    def stop(self) -> None:
        return


@define(eq=False)
class RunnerTrial:
    """A runner around loaded weights, and a cache.

    Attributes:
        tables: sequence's number -> its pages.
    """

    parts: Parts
    context: ExecutorContext
    runner: Runner
    cache: CacheStorage
    tables: dict[int, tuple[int, ...]] = field(factory=dict, init=False)
    _free: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._free = [page * 7 % self.num_pages for page in range(self.num_pages)]

    @classmethod
    def of(cls, parts: Parts) -> RunnerTrial:
        """Load the weights of a composition and build its runner; nothing in the cache is a number."""
        import torch

        from intarsia.models.cache import TensorCache
        from intarsia.models.weights import load_weights

        assert isinstance(parts.executor, _Held)
        context, engine = parts.executor.context, parts.engine
        torch.set_num_threads(engine.threads or 1)
        device = torch.device(engine.device)
        weights = load_weights(
            context.checkpoint,
            context.weight_map,
            dtype=getattr(torch, engine.dtype),
            device=device,
            quantizers=context.quantizers,
            ops=context.ops,
            progress=no_progress,
        )
        tensors = TensorCache.allocate(context.layout, _num_pages(context), device)
        tensors.fill(float("nan"))
        with calling("build"):
            return cls(parts, context, context.build_runner(weights), tensors)

    @property
    def num_pages(self) -> int:
        """Of the cache, without the spare one."""
        return _num_pages(self.context)

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self.parts.spec.num_layers

    def row(self, number: int, start: int, stop: int, *, behind: int = 0) -> Row:
        """Return a row of a sequence's tokens; of its pages the first `behind` are gone."""
        size = self.context.layout.page_size
        table = self.tables.get(number, ())
        table += tuple(self._free.pop() for _ in range(-(-stop // size) - len(table)))
        self.tables[number] = table
        seen = (-1,) * behind + table[behind:]
        pages = (seen,) * len(self.context.layout.groups)
        return Row(
            sequence_id=(str(number), 0), token_ids=tuple(token_ids(number)[start:stop]), start=start, pages=pages
        )

    def forget(self) -> None:
        """Begin anew, with other pages."""
        for table in self.tables.values():
            self._free[:0] = table
        self.tables = {}
        self.cache.fill(float("nan"))

    def batch(self, rows: Sequence[Row], num_padding: int = 0, reads: Sequence[int] | None = None) -> ForwardBatch:
        """Lay rows out, and rows of padding behind them: token 0 at position 0 of the spare page, for slot -1.

        Args:
            rows: as of a plan.
            num_padding: rows of padding.
            reads: indices of the tokens that will be read; None is all.
        """
        import torch

        from intarsia.stage import forward_batch

        layout, device = self.context.layout, torch.device(self.parts.engine.device)
        spare = ((self.num_pages,),) * len(layout.groups)
        pad = Row(sequence_id=("padding", 0), token_ids=(0,), start=0, pages=spare)
        whole = [*rows, *(pad,) * num_padding]
        batch = forward_batch(whole, [row.token_ids for row in whole], layout, device)
        if num_padding:
            slots = tuple(group.clone() for group in batch.slots_T)
            for group in slots:
                group[-num_padding:] = -1
            batch = evolve(batch, slots_T=slots)
        if reads is not None:
            batch = evolve(batch, read_L=torch.tensor(list(reads), dtype=torch.int64, device=device))
        preparing = self.runner if isinstance(self.runner, PreparingRunner) else self.context.attention
        with calling("prepare"):
            return evolve(batch, attention=preparing.prepare(batch, layout))

    def run(
        self, batch: ForwardBatch, layers: range | None = None, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run layers, or all; return a copy of the residual stream (T, E)."""
        import torch

        with calling("run"), torch.inference_mode():
            return self.runner.run(batch, self.cache, layers or range(self.num_layers), hidden_TE).clone()

    def logits(self, hidden_TE: torch.Tensor, rows_L: Sequence[int]) -> torch.Tensor:
        """Return a copy of the logits (L, V) of these tokens."""
        import torch

        with calling("logits"), torch.inference_mode():
            wanted = torch.tensor(list(rows_L), dtype=torch.int64, device=hidden_TE.device)
            return self.runner.logits(hidden_TE, wanted).clone().cpu()

    def step(self, *rows: Row, num_padding: int = 0) -> torch.Tensor:
        """Run rows; return the logits (T, V) after all of their tokens, without those of padding."""
        hidden = self.run(self.batch(rows, num_padding))
        return self.logits(hidden, range(sum(len(row.token_ids) for row in rows)))

    def entries(self, number: int, stop: int) -> list[torch.Tensor]:
        """Return, a layer, keys and values (2, stop, K, D) of a sequence's first tokens, in fp32."""
        import torch

        size, found = self.context.layout.page_size, []
        order = self.context.layout.order
        places = [(self.tables[number][i // size], i % size) for i in range(stop)]
        for index in range(self.num_layers):
            layer = self.cache.layer(index)
            stored = [t if order == "PSKD" else t.transpose(1, 2) for t in (layer.keys, layer.values)]
            entries = torch.stack([torch.stack([t[page, slot] for page, slot in places]) for t in stored])
            found.append(entries.float().cpu())
        return found

    def snapshot(self) -> list[torch.Tensor]:
        """Return the bits of every real page, a layer and tensor: (P, S, ...) as bytes."""
        import torch

        found = []
        for index in range(self.num_layers):
            layer = self.cache.layer(index)
            for tensor in (layer.keys, layer.values):
                laid = tensor if self.context.layout.order == "PSKD" else tensor.transpose(1, 2)
                found.append(laid[: self.num_pages].contiguous().view(torch.uint8).cpu().clone())
        return found


def _num_pages(context: ExecutorContext) -> int:
    return _NUM_SLOTS // context.layout.page_size


class RunnerCase:
    """A runner on trial: subclasses say whose provider it is, and what it needs.

    Attributes:
        options: the runner's own, as a config has them.
        sections: of a config, besides those of the suite: what it needs of attention, kernels and others.
        models: names of the suite's tiny models (`MODELS`) that it runs. One that it refuses, with its reason, is left
            out of most claims by itself.
        lays_out_pages: whether it keeps keys and values within a page in an order of its own. One that brings its own
            attention can: pages are moved whole, and nobody else reads them. None: where it `provides` attention.
        tolerance: how far a logit may be from that of the ops, in fp32, times the largest logit.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    sections: ClassVar[Mapping[str, Any]] = {}
    models: ClassVar[Sequence[str]] = tuple(MODELS)
    lays_out_pages: ClassVar[bool | None] = None
    tolerance: ClassVar[float] = 2e-5

    def provider(self) -> Provider:
        """Return the runner's provider."""
        raise NotImplementedError("provider() must return the runner's provider")

    @property
    def orders_slots(self) -> bool:
        """Whether slots within a page are in an order of its own."""
        own = self.lays_out_pages
        return "attention" in self.provider().provides if own is None else own

    def plugins(self) -> Sequence[object]:
        """Return plugins that the runner needs and that are not installed."""
        return ()

    def compose(self, model: str, **sections: Any) -> Parts:
        """Return the parts of an engine with this runner.

        Raises:
            IntarsiaError: it refuses the model or a section.
        """
        provider = self.provider()
        # What is bitwise in fp32, so that what the runner does is seen.
        plain = {"attention": "auto" if "attention" in provider.provides else "tiled"}
        merged = {**plain, **self.sections, "runner": {"use": KEY, **self.options}}
        for name, section in sections.items():
            both = isinstance(section, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **section} if both else section
        return _composed(model, merged, self.plugins(), runner=provider)

    def trial(self, model: str = "even", **sections: Any) -> RunnerTrial:
        """Return the runner of a model, and a cache."""
        return RunnerTrial.of(self.compose(model, **sections))

    def reference(self, model: str = "even", **sections: Any) -> RunnerTrial:
        """Return the runner that calls the torch ops one by one, of the same model in fp32 unless sections say so."""
        return RunnerTrial.of(_composed(model, {"runner": "eager", "attention": "eager", **sections}))

    def check_changed(self, trial: RunnerTrial, before: Sequence[torch.Tensor], rows: Sequence[Row]) -> None:
        """Raise AssertionError where more has changed since a snapshot than the slots of rows' tokens."""
        size, written = trial.context.layout.page_size, set[tuple[int, ...]]()
        for row in rows:
            span = range(row.start, row.start + len(row.token_ids))
            written |= {(row.pages[0][i // size], i % size) for i in span}
        pages = {place[0] for place in written}
        for old, new in zip(before, trial.snapshot(), strict=True):
            changed = {tuple(place) for place in (old != new).flatten(2).any(-1).nonzero().tolist()}
            stray = sorted(place for place in changed - written if not (self.orders_slots and place[0] in pages))
            assert not stray, f"(page, slot) {stray[:4]} changed, and hold no token of the step"

    def check_near(self, found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Raise AssertionError unless logits are finite and near."""
        assert found.shape == wanted.shape, f"{what}: the shape is {tuple(found.shape)}, not {tuple(wanted.shape)}"
        assert bool(found.isfinite().all()), f"{what}: some are not finite"
        off, largest = float((found - wanted).abs().max()), float(wanted.abs().max())
        assert off <= self.tolerance * max(1.0, largest), (
            f"{what}: off by {off:.3g}, where the largest is {largest:.3g}"
        )


def _composed(model: str, sections: Mapping[str, Any], plugins: Sequence[object] = (), **trial: Provider) -> Parts:
    held = Provider(key="held", summary="of a suite", build=_Held)
    cached = {"use": "paged", "page_size": 16, "memory": "1MiB"} | dict(sections.get("cache", {}))
    merged = {**sections, "cache": cached, "executor": "held"}
    return composed(model_of(model), merged, [*plugins, offered(executor=held)], **trial)[1]
