"""What composition made: every choice, and the parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import Factory, field, frozen

from intarsia.protocols.choosing import Drafter, LogitsProcessor
from intarsia.protocols.execution import Executor
from intarsia.protocols.forward import AttentionBackend
from intarsia.protocols.model import Quantizer
from intarsia.protocols.scheduling import CacheAllocator, Scheduler
from intarsia.types import (
    CacheLayout,
    Checkpoint,
    DecoderSpec,
    EngineOptions,
    Invariance,
    Provider,
    SamplingDefaults,
    WeightMap,
)

if TYPE_CHECKING:
    from intarsia.protocols.contexts import Partition


@frozen(kw_only=True)
class Selection:
    """One choice that composition made.

    Attributes:
        slot: where the part goes.
        provider: who offered it.
        plugin, distribution, version: whose plugin that is.
        asked_by: `config` where a config named it, `auto` where composition chose.
        reason: why it was chosen; for `auto`, what the part said of its fit and who was passed over.
        options: the instance of its options class.
    """

    slot: str
    provider: Provider
    plugin: str
    distribution: str
    version: str
    asked_by: str
    reason: str
    options: Any

    @property
    def name(self) -> str:
        """What tables call the part: `scheduler.inflight`."""
        return f"{self.slot}.{self.provider.key}"

    @property
    def title(self) -> str:
        """What messages call it: `scheduler 'inflight' of plugin 'inflight' (intarsia 0.1.0)`."""
        return f"{self.slot} {self.provider.key!r} of plugin {self.plugin!r} ({self.distribution} {self.version})"


@frozen(kw_only=True)
class Parts:
    """The composed parts of an engine, before weights load: what `check_composition` judges.

    Where ranks share the model, `spec` and `weight_map` are the whole model's. What parts were built from, such as
    `weight_bytes`, `layout` and `ops`, is this rank's.

    Attributes:
        engine: the shared options, with device, dtype, max_model_len and threads resolved.
        selections: every choice with its reason, in the order of composition.
        tokenizer: None where the model's files have none; then prompts are token ids.
        weight_bytes: of all weights as they will be in memory.
        num_ids: token ids that can be chosen; a padded vocabulary has logits beyond them.
        sampling: what requests take that do not say.
        ops: the table of named ops, resolved.
        invariance: the level that the whole keeps: the weakest of its parts'.
        partition: how ranks share the model; None where one device has all of it.
        num_host_pages: pages of each cache group in host memory, for sequences that are swapped out.
        deprecated: what its plugins use of the surface that goes in a release to come.
        built: slot -> part, for the slots that others can require; a tuple where a slot holds several.
    """

    engine: EngineOptions
    selections: tuple[Selection, ...]
    checkpoint: Checkpoint
    tokenizer: Any
    spec: DecoderSpec
    weight_map: WeightMap
    weight_bytes: int
    layout: CacheLayout
    num_pages: int
    num_ids: int
    ops: Any
    attention: AttentionBackend
    cache: CacheAllocator
    scheduler: Scheduler
    executor: Executor
    invariance: Invariance
    quantizers: tuple[Quantizer, ...] = ()
    drafter: Drafter | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    sampling: SamplingDefaults = Factory(SamplingDefaults)
    partition: Partition | None = None
    num_host_pages: int = 0
    deprecated: tuple[str, ...] = ()
    built: Mapping[str, Any] = field(factory=dict, repr=False, eq=False)

    def selection(self, slot: str) -> Selection:
        """Return the (first) choice for a slot; KeyError where the slot is empty."""
        for selection in self.selections:
            if selection.slot == slot:
                return selection
        raise KeyError(slot)
