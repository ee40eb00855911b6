"""From a request to its sequences: prompt, limits and stops settled, a seed drawn, logits processors told."""

from __future__ import annotations

import random
import secrets
import time

import attrs
from attrs import define, field

from intarsia.errors import InvalidRequestError
from intarsia.preparing import Arrival, Processors
from intarsia.prompts import Prompts
from intarsia.protocols import Parts
from intarsia.seams import Seams
from intarsia.sequence import Sequence
from intarsia.text import TextStream
from intarsia.types import Request

#: Bits of a drawn seed: a number that every JSON reader keeps exactly.
_SEED_BITS = 53


@define
class Arrivals:
    """Takes in an engine's requests.

    Attributes:
        prompts: reads them.
    """

    prompts: Prompts
    _processors: Processors
    _seeds: random.Random | None = field(default=None)

    @classmethod
    def of(cls, parts: Parts) -> Arrivals:
        """Take requests in for these parts."""
        options = parts.engine
        assert options.max_model_len is not None
        seeds = None if options.seed is None else random.Random(options.seed)  # noqa: S311
        return cls(Prompts(parts.tokenizer, parts.num_ids, options.max_model_len), Processors.of(parts), seeds)

    def read(self, request: Request, parts: Parts, seams: Seams) -> Arrival:
        """Check a request and make its sequences; the seeds are all that changes.

        Raises:
            InvalidRequestError: it cannot be run.
            PluginError: the cache fails when asked whether it could ever hold it; names its plugin.
        """
        request = attrs.evolve(request, params=request.params.filled(parts.sampling))
        params, tokenizer = request.params, parts.tokenizer
        token_ids, max_total, stop_ids = self.prompts.read(request)
        with seams.ask(parts, "cache", "capacity", request.request_id):
            _check_fits(max_total, parts)
        seed = params.seed if params.seed is not None else self._draw_seed()
        now = time.perf_counter()
        sequences = [
            Sequence(
                request=request,
                choice=choice,
                token_ids=list(token_ids),
                num_prompt=len(token_ids),
                max_total=max_total,
                seed=seed,
                stop_ids=stop_ids,
                text=TextStream.open(tokenizer, params) if tokenizer is not None else None,
                arrived=now,
            )
            for choice in range(params.n)
        ]
        return Arrival(sequences, self._processors.prepare(params))

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(_SEED_BITS) if self._seeds is not None else secrets.randbits(_SEED_BITS)


def _check_fits(max_total: int, parts: Parts) -> None:
    """Refuse at once what would wait for ever."""
    cache, page_size = parts.cache, parts.layout.page_size
    if not cache.capacity(max_total):
        raise InvalidRequestError(
            f"sampling.max_tokens: prompt and answer come to {max_total} tokens, and the cache of "
            f"{cache.num_pages} pages of {page_size} holds {cache.num_pages * page_size}",
            field="sampling.max_tokens",
        )
