"""How a drafter's contract runs it: for which model, beside which requests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from intarsia.testing.drafter_watch import WatchedDrafter, watching
from intarsia.testing.engines import configured, said, scratch, tiny_config
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Provider, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine

__all__ = ["PARAMS", "PROMPTS", "DrafterCase", "check_plain", "no_faults", "watched"]

#: Prompts whose ends have come before, which come near it, and which have nothing of it.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (1, 1, 1),
    (5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6),
    (3,),
    tuple(range(40)),
    (10, 11, 12, 13, 10, 11, 14, 10, 11),
    (0, 0, 2, 0, 0),
)
#: Greedy, seeded, with penalties, with choices, short, stopped: a batch takes one a prompt.
PARAMS: tuple[SamplingParams, ...] = (
    SamplingParams(temperature=0, max_tokens=40, logprobs=2),
    SamplingParams(temperature=0.7, seed=11, max_tokens=40),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=30),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5, n=3, max_tokens=20),
    SamplingParams(temperature=0.3, seed=3, max_tokens=1),
    SamplingParams(temperature=0, stop_token_ids=(7, 8, 9), max_tokens=40),
)


class DrafterCase:
    """A drafter on trial: subclasses say whose provider it is, and what it need not promise.

    Attributes:
        options: the drafter's own, as a config has them.
        num_ids: of the tiny random model that it drafts for.
        page_tokens: tokens of the small cache that forces preemptions.
        repeats: equal calls bring equal guesses. One that looks at the time that steps take cannot say so.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    num_ids: ClassVar[int] = 64
    page_tokens: ClassVar[int] = 160
    repeats: ClassVar[bool] = True

    def provider(self) -> Provider:
        """Return the drafter's provider."""
        raise NotImplementedError("return the provider of the drafter on trial")

    def model(self, folder: Path) -> Path:
        """Return the model's folder; made under `folder` unless this is overridden."""
        return save_tiny_model(folder / "model", num_ids=self.num_ids)

    # --- for the claims ---------------------------------------------------------------------------------------------

    @contextmanager
    def plain(self, model: Path, **sections: Any) -> Iterator[Engine]:
        """Lend an engine without the drafter."""
        from intarsia.engine import Engine

        with Engine.from_config(tiny_config(model, **sections)) as engine:
            yield engine

    @contextmanager
    def drafting(self, model: Path, **sections: Any) -> Iterator[Engine]:
        """Lend an engine with the drafter, watched. What it did wrong is no fault yet: see `no_faults`."""
        from intarsia.engine import Engine

        config = tiny_config(model, **sections) | {"drafter": {"use": "watched", **self.options}}
        with configured(partial(Engine.from_config, config, plugins=[watching(self.provider())])) as engine:
            yield engine

    def check(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **sections: Any
    ) -> WatchedDrafter:
        """Compare the answers of an engine with those of one without the drafter."""
        asked = [list(prompt) for prompt in prompts]
        with scratch() as folder:
            model = self.model(folder)
            with self.plain(model, **sections) as plain:
                wanted = [[said(choice) for choice in c.choices] for c in plain.generate(asked, list(params))]
            with self.drafting(model, **sections) as engine:
                got = [[said(choice) for choice in c.choices] for c in engine.generate(asked, list(params))]
                no_faults(engine)
                assert got == wanted, "the drafter changed an answer"
                return watched(engine)


def watched(engine: Engine) -> WatchedDrafter:
    """Return the drafter of an engine that `DrafterCase.drafting` lent."""
    drafter = engine.parts.drafter
    assert isinstance(drafter, WatchedDrafter)
    return drafter


def no_faults(engine: Engine) -> None:
    """Raise AssertionError where the drafter failed or broke the contract."""
    assert not watched(engine).faults, watched(engine).faults
    figures = engine.stats()["speculation"]
    assert not figures["failures"], figures["last_failure"]


def check_plain(figures: Mapping[str, Any]) -> None:
    """JSON would make texts of keys: read back, the figures must be the same."""
    try:
        plain = json.loads(json.dumps(dict(figures), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"stats: {error}; they are sent to clients as JSON") from error
    assert plain == dict(figures), "stats: use texts for keys, and lists for tuples"
