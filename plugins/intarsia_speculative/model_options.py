"""The options of drafters that run a model."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, optional

from intarsia.types import Dtype
from intarsia_speculative.options import DraftOptions


@frozen(kw_only=True)
class DraftModelOptions(DraftOptions):
    """Options of a second model that drafts."""

    #: guesses for a sequence in a step, at most
    k: int = field(default=4, validator=ge(1))
    #: a name, a path or a hub id, as for the target; its vocabulary must be the target's
    model: str = ""
    #: bytes for its keys and values, such as "1GiB"; auto is half of what the target and its weights leave
    memory: str = "auto"
    #: of its weights and activations; auto is the target's
    dtype: Dtype = "auto"
    #: key of a quantizer for its weights, such as "int4": the target itself in fewer bits drafts well; none by default
    quantizer: str = ""


@frozen(kw_only=True)
class LayerSkipOptions(DraftOptions):
    """Options of the target's own first layers."""

    #: guesses for a sequence in a step, at most
    k: int = field(default=4, validator=ge(1))
    #: how many of the first layers draft; None is half of them
    layers: int | None = field(default=None, validator=optional(ge(1)))
