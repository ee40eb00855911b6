"""Running a composed model over token ids outside an engine: no scheduler, no sampling, one sequence at a time.

Shape legend: T tokens, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from attrs import evolve, frozen

from intarsia.compose import compose
from intarsia.errors import CheckpointError, CompositionError, ConfigError
from intarsia.executor import LocalExecutor
from intarsia.plugins import Registry
from intarsia.protocols import Parts, Progress
from intarsia.types import AUTO, NONE, BatchPlan, Choice, EngineConfig, Row, Want

if TYPE_CHECKING:
    import torch

_ID = ("forward", 0)
#: Logits that are in memory at once, in numbers: 64 MiB in fp32.
_LOGITS = 1 << 24
#: Tokens that run at once: fewer where the vocabulary is large.
_FEWEST, _MOST = 16, 512


@frozen(eq=False)
class ComposedModel:
    """A model as a config composes it: its runner, attention, cache and weights. A context manager, which frees them.

    Attributes:
        parts: what it is made of.
        executor: runs it.
    """

    parts: Parts
    executor: LocalExecutor

    @classmethod
    def compose(
        cls,
        config: EngineConfig,
        plugins: Mapping[str, object] | Sequence[object] = (),
        *,
        shares_device: bool = False,
    ) -> ComposedModel:
        """Choose and check its parts; weights load in `start`. A drafter, which changes no logits, is left out.

        Args:
            config: of the engine that would run it.
            plugins: plugins of this process, besides those that are installed.
            shares_device: whether other models are to run beside it: then a cache of no given size holds one sequence
                of `max_model_len` tokens.

        Raises:
            IntarsiaError: as of `compose`.
            CompositionError: the executor is none of this process.
        """
        config = evolve(config, drafter=Choice(NONE))
        registry = Registry.discover(config.engine.plugins, plugins)
        parts = compose(config, registry)
        if shares_device and config.cache.options.get("memory", AUTO) == AUTO:
            parts = compose(_with_memory(config, _sequence_bytes(parts)), registry)
        if not isinstance(parts.executor, LocalExecutor):
            key = parts.selection("executor").provider.key
            raise CompositionError(
                f"executor: {key!r} gives no logits of every token; executor = 'local' does", field="executor"
            )
        return cls(parts, parts.executor)

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids, with the BOS that the model's prompts have.

        Raises:
            ConfigError: the model has no tokenizer.
            CheckpointError: its tokenizer gives ids that the model has not.
            InvalidRequestError: the tokenizer has no ids for the text.
        """
        parts = self.parts
        if parts.tokenizer is None:
            raise ConfigError("model: its files hold no tokenizer, so no text can be read with it", field="model")
        ids: list[int] = parts.tokenizer.encode(text)
        self.check_ids(ids)
        return ids

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise CheckpointError where an id is not in the model's vocabulary."""
        size = self.parts.spec.vocab_size
        for token_id in {min(token_ids, default=0), max(token_ids, default=0)}:
            if not 0 <= token_id < size:
                raise CheckpointError(
                    f"tokenizer: the text has the token id {token_id}, and the model's vocabulary has {size} ids",
                    field="tokenizer",
                )

    def start(self, progress: Progress) -> None:
        """Load the weights and make the cache."""
        self.executor.start(progress)

    def logits(self, token_ids: Sequence[int], first: int = 0) -> Iterator[torch.Tensor]:
        """Run a sequence and yield the fp32 logits (T, V) of its tokens from `first` on, some tokens at a time.

        Args:
            token_ids: the sequence, of `max_model_len` tokens at most.
            first: the tokens before it run without logits.
        """
        cache = self.parts.cache
        chunk = min(_MOST, max(_FEWEST, _LOGITS // self.parts.spec.vocab_size))
        try:
            found = cache.reserve(_ID, token_ids, len(token_ids))
            assert found == 0, "the cache has room for max_model_len, and nothing is committed to it"
            if moves := cache.take_moves():
                self.executor.submit(BatchPlan(moves=moves))
                self.executor.collect()
            for start, stop in _pieces(first, len(token_ids), chunk):
                row = Row(
                    sequence_id=_ID,
                    token_ids=tuple(token_ids[start:stop]),
                    start=start,
                    want=Want.NONE,
                    pages=cache.pages(_ID),
                )
                if start < first:
                    self.executor.forward([row])
                else:
                    yield self.executor.all_logits(row)
        finally:
            cache.release(_ID)

    def stop(self) -> None:
        """Free weights and cache."""
        self.executor.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _pieces(first: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Cut 0..first and first..stop into pieces of a size at most."""
    before = [(start, min(start + _MOST, first)) for start in range(0, first, _MOST)]
    return before + [(start, min(start + size, stop)) for start in range(first, stop, size)]


def _sequence_bytes(parts: Parts) -> int:
    """Return what the cache of one sequence of max_model_len takes."""
    max_len = parts.engine.max_model_len
    assert max_len is not None
    return -(-max_len // parts.layout.page_size) * parts.layout.page_bytes


def _with_memory(config: EngineConfig, num_bytes: int) -> EngineConfig:
    options = {**config.cache.options, "memory": str(num_bytes)}
    return evolve(config, cache=evolve(config.cache, options=options))
