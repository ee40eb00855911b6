"""Claims of attention backends: steps that are prepared once, for several layers, one after another and at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from attrs import evolve

from intarsia.protocols import FixedAttention
from intarsia.testing.attention_case import AttentionCase
from intarsia.testing.attention_rows import ROUNDING, AttentionRow, attention_of, check_row
from intarsia.testing.attention_step import AttentionStep, contents
from intarsia.testing.claims import unclaimed
from intarsia.types import AttentionSpec, Unfit

__all__ = ["LifeClaims"]

#: Layers of a model: two share page tables and differ in all else, others see less, or have other heads.
MIXED: tuple[AttentionSpec, ...] = (
    attention_of(6, 2, 16),
    attention_of(6, 2, 16, window=20),
    attention_of(4, 2, 16, scale=0.5),
    attention_of(4, 4, 32),
    attention_of(6, 2, 16, window=5),
)
_SHAPES = ((0, 37), (63, 1), (40, 3), (17, 1))


class LifeClaims(AttentionCase):
    """Steps and layers."""

    def _mixed(self) -> Iterator[tuple[str, list[AttentionSpec]]]:
        """Yield dtypes, and those of `MIXED` that a model of that dtype can have."""
        found = False
        for dtype in self.dtypes:
            specs = [spec for spec in MIXED if not isinstance(self.fit(dtype, spec), Unfit)]
            if specs and not isinstance(self.fit(dtype, *specs), Unfit):
                found = True
                yield dtype, specs
        if not found:
            unclaimed("its fit refuses all layers that the suite asks for")

    def _step(
        self, dtype: str, specs: Sequence[AttentionSpec], shapes: Sequence[tuple[int, int]], seed: int = 0
    ) -> AttentionStep:
        """Return a step through layers of these specs, each with numbers of its own."""
        made: torch.dtype = getattr(torch, dtype)
        layers = [
            (spec, [AttentionRow.random(spec, *shape, seed + 100 * i + j, made) for j, shape in enumerate(shapes)])
            for i, spec in enumerate(specs)
        ]
        placed = self.trial(dtype, specs[0]).placement(scatter=seed)
        return AttentionStep.of(layers, placed, self.device)

    def _check(self, step: AttentionStep, index: int, outs: Sequence[torch.Tensor], what: str) -> None:
        layer = step.layers[index]
        for out, row in zip(outs, layer.rows, strict=True):
            dtype = str(out.dtype).removeprefix("torch.")
            try:
                check_row(out, row, layer.spec, step.layout.format, self.rounding.get(dtype, ROUNDING[dtype]))
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from None

    def test_layers_of_all_groups_share_a_preparation(self) -> None:
        """What is prepared once a step serves every layer, of whatever group, in any order and more than once."""
        for dtype, specs in self._mixed():
            part = self.build(dtype, *specs)
            step = self._step(dtype, specs, _SHAPES).prepare(part)
            for index in (*range(len(specs)), *reversed(range(len(specs)))):
                self._check(step, index, step.attend(part, index), f"layer {index} of {len(specs)}")

    def test_a_step_owes_nothing_to_another(self) -> None:
        """Steps that are prepared one after another or at once, and run in any order, keep their own rows and pages."""
        for dtype, specs in self._mixed():
            part = self.build(dtype, *specs)
            shapes = (_SHAPES, _SHAPES, ((70, 1),), ((0, 50), (5, 1), (31, 1), (90, 20), (8, 2)))
            steps = [self._step(dtype, specs, each, seed) for seed, each in enumerate(shapes)]
            for number, step in enumerate(steps):
                ready = step.prepare(part)
                self._check(ready, 0, ready.attend(part), f"step {number}")
            ready_all = [step.prepare(part) for step in steps]
            for number, ready in reversed(list(enumerate(ready_all))):
                for index in range(len(specs)):
                    self._check(ready, index, ready.attend(part, index), f"step {number} of {len(steps)} at once")

    def test_nothing_that_it_is_given_is_written_to(self) -> None:
        """Queries, cache and batch hold after a step what they held before it."""
        for dtype, specs in self._mixed():
            part = self.build(dtype, *specs)
            step = self._step(dtype, specs, _SHAPES)
            before = contents(step)
            ready = step.prepare(part)
            for index in range(len(specs)):
                ready.attend(part, index)
            for name, now in contents(ready).items():
                assert torch.equal(now, before[name]), f"it writes to the {name}"

    def test_fixed_metadata_serves_later_steps(self) -> None:
        """What `prepare_fixed` makes takes the numbers of later steps, which then are run as if prepared themselves."""
        for dtype, specs in self._mixed():
            part = self.build(dtype, *specs)
            if not isinstance(part, FixedAttention):
                unclaimed("it has no prepare_fixed: no CUDA graph can hold it")
            kept = None
            for number, starts in enumerate(((0, 1, 15, 60), (127, 3, 64, 16), (17, 120, 0, 99))):
                step = self._step(dtype, specs, [(start, 1) for start in starts], number)
                with torch.inference_mode():
                    ready = part.prepare_fixed(step.batch, step.layout, 128)
                    if kept is not None:
                        kept.refill(ready)
                kept = ready if kept is None else kept
                step = evolve(step, batch=evolve(step.batch, attention=kept))
                for index in range(len(specs)):
                    self._check(step, index, step.attend(part, index), f"step {number} by fixed metadata")
