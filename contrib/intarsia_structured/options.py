"""The config's `[logits_processors]` section of `structured_output`."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt, le


@frozen(kw_only=True)
class StructuredOptions:
    """Limits of what requests may ask of `structured_output`."""

    #: the longest schema, regex, grammar or list of choices, in bytes of UTF-8
    max_schema_bytes: int = field(default=65536, validator=[ge(1), le(4 << 20)])
    #: the longest that compiling may take, in seconds, waiting for a worker not counted
    timeout_s: float = field(default=10.0, validator=[gt(0), le(600)])
    #: structures that are compiled at once, each in a process of its own that is started at first need
    workers: int = field(default=1, validator=[ge(1), le(64)])
    #: compiled structures that are kept, the last used of them
    cache_size: int = field(default=64, validator=[ge(1), le(65536)])
    #: whitespace characters that may stand together in JSON; 0 is compact
    max_whitespace: int = field(default=8, validator=[ge(0), le(1024)])
