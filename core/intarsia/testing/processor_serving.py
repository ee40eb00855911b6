"""What logits processors keep in an engine: chunks, drafts, neighbours and preemptions change no answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from intarsia.errors import InvalidRequestError
from intarsia.testing.claims import unclaimed
from intarsia.testing.engines import offering, said, scratch, tiny_config, token_bytes, unharmed
from intarsia.testing.processor_case import NUM_LOGITS, PROMPT, ProcessorCase
from intarsia.testing.tiny import save_tiny_model
from intarsia.testing.tiny_tokenizer import save_byte_tokenizer
from intarsia.types import Request, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine

__all__ = ["ServingClaims"]

#: Of requests, beside what they ask of the processor.
_VARIANTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 20},
    {"temperature": 1.0, "seed": 3, "n": 3, "max_tokens": 20, "logprobs": 1},
)
_PLAIN = SamplingParams(temperature=0, max_tokens=20, logprobs=1)


class ServingClaims(ProcessorCase):
    """Claims that are tried through an engine of a tiny random model."""

    def test_answers_do_not_depend_on_company(self) -> None:
        """A request says beside others what it says alone, choices and all; whom it does not apply to is unchanged."""
        with scratch() as folder:
            model = _saved(folder)
            requests = self._varied()
            with self._serving(model) as engine:
                alone = [_told(engine, [PROMPT], [params])[0] for params in requests]
                together = _told(engine, [PROMPT] * (len(requests) + 1), [*requests, _PLAIN])
            assert together[:-1] == alone, "an answer depends on who else is there"
            if not self.build().applies(_PLAIN):
                from intarsia.engine import Engine

                with Engine.from_config(tiny_config(model)) as without:
                    assert together[-1] == _told(without, [PROMPT], [_PLAIN])[0], "a request that it does not apply to"

    def test_drafts_change_no_answer(self) -> None:
        """With right and wrong drafts, which are verified many at once, answers are the same."""
        with scratch() as folder:
            model = _saved(folder)
            requests = self._varied(n=1)
            for params in (requests[0], requests[-1]):
                with self._serving(model) as engine:
                    (plain,) = _told(engine, [PROMPT], [params])
                ids = list(plain[0][0])
                wrong = [token if turn % 3 else (token + 5) % 250 for turn, token in enumerate(ids)]
                for guesses in (ids, wrong, [5] * 20):
                    drafter = {"use": "scripted", "ids": guesses, "prompt_tokens": len(PROMPT), "k": 4}
                    with self._serving(model, drafter=drafter) as engine:
                        found = _told(engine, [PROMPT], [params])[0]
                        assert found == plain, f"drafts change an answer from {plain[0][0]} to {found[0][0]}"

    def test_chunks_and_preemptions_change_no_answer(self) -> None:
        """Nor do chunks of prompts, batches that wait for each other, and sequences that are opened again."""
        cramped = {"use": "paged", "page_size": 4, "memory": str(token_bytes(64))}
        others: tuple[dict[str, Any], ...] = (
            {"scheduler": "static", "cache": {"use": "contiguous", "memory": "16MiB"}},
            {"scheduler": {"use": "inflight", "max_tokens": 3}},
            {"scheduler": "inflight", "cache": cramped, "engine": {"max_model_len": 48}},
        )
        with scratch() as folder:
            model = _saved(folder)
            requests = self._varied()
            prompts = [(*PROMPT, *range(turn)) for turn in range(len(requests))]
            with self._serving(model) as engine:
                plain = _told(engine, prompts, requests)
            seen = 0
            for sections in others:
                with self._serving(model, **sections) as engine:
                    assert _told(engine, prompts, requests) == plain, f"{sections} changes an answer"
                    seen += engine.stats()["preemption"]["preempted"]
            assert seen, "nobody was preempted"

    def test_a_request_that_is_refused_fails_alone(self) -> None:
        """What it cannot do ends the request that asks for it, before a step; others go on, and it still works."""
        if not self.refused:
            unclaimed("nothing that a request could ask is refused: `refused` is empty")
        with scratch() as folder, self._serving(_saved(folder)) as engine:
            good = self.request(self.asked[0], temperature=0, max_tokens=12)
            before = _told(engine, [PROMPT], [good])
            for turn, says in enumerate(self.refused):
                engine.add(Request(request_id=f"good-{turn}", prompt=list(PROMPT), params=good))
                self._refused(engine, f"bad-{turn}", self.request(says, max_tokens=12))
            assert _told(engine, [PROMPT], [good]) == before, "after a refusal it says something else"

    def _refused(self, engine: Engine, name: str, params: SamplingParams) -> None:
        """Ask for what cannot be done; whoever else is there must come to its end."""
        refused = False
        try:
            engine.add(Request(request_id=name, prompt=list(PROMPT), params=params))
        except InvalidRequestError:
            refused = True
        while engine.has_work:
            for output in engine.step():
                if output.request_id == name:
                    assert output.finish_reason == "error" and not output.token_ids, "a step was run before it failed"
                    refused = True
                else:
                    assert output.error is None, f"another request ends with {output.error}"
        assert refused, f"a request that says {dict(params.logits_processors)!r:.200} is not refused"

    # --- what they are made of --------------------------------------------------------------------------------------

    def _varied(self, **over: Any) -> list[SamplingParams]:
        requests = self.requests(self.build())[:3]
        return [evolve(params, **variant | over) for params in requests for variant in _VARIANTS]

    @contextmanager
    def _serving(self, model: Path, **sections: Any) -> Iterator[Engine]:
        """Lend an engine with the processor."""
        from intarsia.engine import Engine
        from intarsia.testing import scripted

        provider = self.provider()
        config = tiny_config(model, **sections) | {"logits_processors": [{"use": provider.key, **self.options}]}
        with Engine.from_config(config, plugins=[scripted, *offering("logits_processors", provider)]) as engine:
            yield engine


def _saved(folder: Path) -> Path:
    """Save a tiny model with a padded vocabulary and a tokenizer."""
    return save_byte_tokenizer(save_tiny_model(folder / "model", num_ids=NUM_LOGITS))


def _told(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Any]:
    """Return what each choice of each request says."""
    asked = [list(prompt) for prompt in prompts]
    done = unharmed("generate", engine.generate, asked, list(params))
    return [[said(choice) for choice in one.choices] for one in done]
