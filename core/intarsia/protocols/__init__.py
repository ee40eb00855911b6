"""What each kind of part can do, and the context each is built from. Public; needs no torch.

Every method says its side effects. Parts are single-threaded: the engine calls them from its own thread.
Shape legend: T tokens, R rows, L rows of logits, H heads, K kv heads, D head dim, E embed, V vocab.
"""

from typing import TYPE_CHECKING, Any

from intarsia.deprecations import old_name
from intarsia.protocols.choosing import (
    Drafter,
    DraftRequest,
    LogitsProcessor,
    SequenceProcessor,
    StepCost,
    Target,
    Verified,
)
from intarsia.protocols.composition import Parts, Selection
from intarsia.protocols.contexts import (
    CacheContext,
    CommandContext,
    Context,
    DrafterContext,
    ExecutorContext,
    FrontendContext,
    InnerRunner,
    LoaderContext,
    ModelContext,
    PartContext,
    Partition,
    PartitionContext,
    RunnerContext,
    TokenizerView,
)
from intarsia.protocols.execution import Choosing, Demands, Executor, ResolvesPending, Stage
from intarsia.protocols.forward import (
    AttentionBackend,
    CacheStorage,
    FixedAttention,
    LayerCache,
    LikeliestRunner,
    PreparingRunner,
    Runner,
    SwappingStorage,
)
from intarsia.protocols.model import Divisible, Kernel, Kernels, Loader, ModelFamily, Quantizer
from intarsia.protocols.replacing import HandsOver, HeldSequence, ReplacesDrafter
from intarsia.protocols.scheduling import (
    CacheAllocator,
    PlansAhead,
    Scheduler,
    SequenceView,
    StorageMaker,
    SwappingAllocator,
)
from intarsia.protocols.serving import Command, EngineHandle, Frontend, Progress

__all__ = [
    "AttentionBackend",
    "CacheAllocator",
    "CacheContext",
    "CacheStorage",
    "Choosing",
    "Command",
    "CommandContext",
    "Context",
    "Demands",
    "Divisible",
    "DraftRequest",
    "Drafter",
    "DrafterContext",
    "EngineHandle",
    "Executor",
    "ExecutorContext",
    "FixedAttention",
    "Frontend",
    "FrontendContext",
    "HandsOver",
    "HeldSequence",
    "InnerRunner",
    "Kernel",
    "Kernels",
    "LayerCache",
    "LikeliestRunner",
    "Loader",
    "LoaderContext",
    "LogitsProcessor",
    "ModelContext",
    "ModelFamily",
    "PartContext",
    "Partition",
    "PartitionContext",
    "Parts",
    "PlansAhead",
    "PreparingRunner",
    "Progress",
    "Quantizer",
    "ReplacesDrafter",
    "ResolvesPending",
    "Runner",
    "RunnerContext",
    "Scheduler",
    "Selection",
    "SequenceProcessor",
    "SequenceView",
    "Stage",
    "StepCost",
    "StorageMaker",
    "SwappingAllocator",
    "SwappingStorage",
    "Target",
    "TokenizerView",
    "Verified",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return old_name(__name__, name)
