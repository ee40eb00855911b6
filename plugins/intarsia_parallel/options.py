"""Options of the parallel executor."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

#: Of times: what selectors, polls and process groups take in milliseconds, with room to spare; 11 days.
_MOST_S = 1e6


@frozen(kw_only=True)
class ParallelOptions:
    """How ranks share a model. There are `tp * pp` of them."""

    #: ranks that hold slices of each layer: heads, feed-forward columns, rows of the vocabulary
    tp: int = field(default=1, validator=ge(1))
    #: stages that hold layers one after another
    pp: int = field(default=1, validator=ge(1))
    #: whether ranks keep activations between the sliced parts of a layer of some tokens alone, not of all
    sequence: bool = False
    #: which rank this process is; None is RANK of the environment, as torchrun sets it, or 0
    rank: int | None = field(default=None, validator=optional(ge(0)))
    #: into how many microbatches a step is cut, which are in different stages at once; None is one a stage
    microbatches: int | None = field(default=None, validator=optional(ge(1)))
    #: seconds of silence after which a rank counts as hanging
    timeout_s: float = field(default=30.0, validator=[gt(0), le(_MOST_S)])
    #: seconds in which all ranks must have connected
    start_timeout_s: float = field(default=300.0, validator=[gt(0), le(_MOST_S)])
    #: seconds that a rank waits at most for what another sends it: longer than any step, or than weights load
    step_timeout_s: float = field(default=1800.0, validator=[gt(0), le(_MOST_S)])
    #: steps between two comparisons of what ranks were told: plans and page tables; 0 compares nothing
    check_every: int = field(default=64, validator=ge(0))
