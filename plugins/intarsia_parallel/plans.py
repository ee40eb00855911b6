"""Plans and results as bytes: msgpack of plain data, read strictly. What rank 0 plans is what every rank reads.

Lists of ids and pages travel as little-endian int32: a page table of a long sequence is most of a plan. What is read is
checked as what a stranger says: a wrong type, an unknown field or a number out of place is an error that names it.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import attrs
import msgpack  # type: ignore[import-untyped]
from attrs import evolve, frozen

from intarsia.errors import ExecutionError, IntarsiaError
from intarsia.types import (
    BatchPlan,
    CacheMove,
    Entered,
    Row,
    RowResult,
    SamplingParams,
    SequenceId,
    StepResult,
    TokenLogprobs,
    Want,
)

_PARAMS: Final = {each.name: each for each in attrs.fields(SamplingParams)}
_MOVES: Final = ("copy", "zero", "swap_out", "swap_in")
#: The largest number that is counted with; limits beyond it are no limits.
_MOST: Final = 2**63 - 1


@frozen
class Packed:
    """A plan as bytes.

    Attributes:
        data: what is sent.
        refused: sequences whose parameters cannot be sent, and why. They run without what their logits processors were
            told, and their results are errors.
    """

    data: bytes
    refused: Mapping[SequenceId, str]


def pack_plan(plan: BatchPlan) -> Packed:
    """Return a plan as bytes; the same plan has the same bytes always."""
    refused: dict[SequenceId, str] = {}
    entered = []
    for each in plan.entered:
        try:
            said = _pack(_write_params(each.params))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            refused[each.sequence_id] = f"sampling.logits_processors: it cannot be sent to other ranks: {error}"
            said = _pack(_write_params(evolve(each.params, logits_processors={})))
        stops = sorted(each.stop_ids)
        ids = _write_ids(each.token_ids)
        entered.append((*each.sequence_id, said, each.seed, ids, each.num_prompt, stops, each.salt))
    rows = [
        (
            *row.sequence_id,
            _write_ids(row.token_ids),
            row.start,
            row.num_drafts,
            row.drafts_wanted,
            row.want.value,
            [_write_ids(table) for table in row.pages],
        )
        for row in plan.rows
    ]
    moves = [(move.kind, move.target, move.source, move.group) for move in plan.moves]
    return Packed(_pack([rows, plan.preempted, entered, plan.left, moves]), refused)


def read_plan(data: bytes) -> BatchPlan:
    """Return the plan that these bytes are.

    Raises:
        ExecutionError: they are none; says what is wrong with them.
    """
    with _Reading("plan"):
        rows, preempted, entered, left, moves = _fields(_unpack(data), "plan", 5)
        return BatchPlan(
            rows=tuple(_read_row(each) for each in _list(rows, "rows")),
            preempted=_read_sequence_ids(preempted, "preempted"),
            entered=tuple(_read_entered(each) for each in _list(entered, "entered")),
            left=_read_sequence_ids(left, "left"),
            moves=tuple(_read_move(each) for each in _list(moves, "moves")),
        )


def pack_result(result: StepResult) -> bytes:
    """Return what a step chose as bytes."""
    rows = [
        (
            *row.sequence_id,
            _write_ids(row.token_ids),
            _write_logprobs(row.logprobs),
            _write_logprobs(row.prompt_logprobs),
            _write_ids(row.drafts),
            row.error,
        )
        for row in result.rows
    ]
    spent = [(name, seconds, calls) for name, (seconds, calls) in result.spent.items()]
    return _pack([rows, result.target_s, result.draft_s, result.draft_error, result.swapped, result.swap_s, spent])


def read_result(data: bytes) -> StepResult:
    """Return the result that these bytes are.

    Raises:
        ExecutionError: they are none; says what is wrong with them.
    """
    with _Reading("result"):
        rows, target_s, draft_s, draft_error, swapped, swap_s, spent = _fields(_unpack(data), "result", 7)
        return StepResult(
            rows=tuple(_read_row_result(each) for each in _list(rows, "rows")),
            target_s=_typed(target_s, float, "target_s"),
            draft_s=_typed(draft_s, float, "draft_s"),
            draft_error=_text_or_none(draft_error, "draft_error"),
            swapped=_count(swapped, "swapped"),
            swap_s=_typed(swap_s, float, "swap_s"),
            spent=dict(_read_spent(each) for each in _list(spent, "spent")),
        )


# --- parts of plans ---------------------------------------------------------------------------------------------------


def _read_row(data: Any) -> Row:
    request_id, choice, ids, start, num_drafts, drafts_wanted, want, pages = _fields(data, "row", 8)
    token_ids = _read_ids(ids, "row.token_ids")
    if not 0 <= _count(num_drafts, "row.num_drafts") < max(1, len(token_ids)):
        raise ValueError(f"row.num_drafts: {num_drafts} of {len(token_ids)} tokens")
    return Row(
        sequence_id=_sequence_id(request_id, choice, "row"),
        token_ids=token_ids,
        start=_count(start, "row.start"),
        num_drafts=num_drafts,
        drafts_wanted=_count(drafts_wanted, "row.drafts_wanted"),
        want=Want(want),
        pages=tuple(_read_ids(table, "row.pages") for table in _list(pages, "row.pages")),
    )


def _read_entered(data: Any) -> Entered:
    request_id, choice, params, seed, ids, num_prompt, stops, salt = _fields(data, "entered", 8)
    return Entered(
        sequence_id=_sequence_id(request_id, choice, "entered"),
        params=_read_params(_unpack(_typed(params, bytes, "entered.params"))),
        seed=_count(seed, "entered.seed"),
        token_ids=_read_ids(ids, "entered.token_ids"),
        num_prompt=_count(num_prompt, "entered.num_prompt"),
        stop_ids=frozenset(_count(each, "entered.stop_ids") for each in _list(stops, "entered.stop_ids")),
        salt=_typed(salt, str, "entered.salt"),
    )


def _read_move(data: Any) -> CacheMove:
    kind, target, source, group = _fields(data, "move", 4)
    if kind not in _MOVES:
        raise ValueError(f"move.kind: {kind!r:.40} is not one of {', '.join(_MOVES)}")
    return CacheMove(
        kind, _typed(target, int, "move.target"), _typed(source, int, "move.source"), _count(group, "move")
    )


def _write_params(params: SamplingParams) -> dict[str, Any]:
    """Return what differs from a request's defaults. Limits beyond 64 bits are cut: no sequence is as long."""
    said: dict[str, Any] = {}
    for name in _PARAMS:
        value = getattr(params, name)
        if value == _default(name):
            continue
        if name == "logit_bias":
            value = sorted(value.items())
        elif name != "seed" and type(value) is int:
            value = min(value, _MOST)
        said[name] = value
    return said


def _default(name: str) -> Any:
    default = _PARAMS[name].default
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return default.factory()  # type: ignore[union-attr]
    return default


def _read_params(said: Any) -> SamplingParams:
    if type(said) is not dict:
        raise ValueError("entered.params: no map")
    for name in said:
        if name not in _PARAMS:
            raise ValueError(f"entered.params: there is no {name!r:.40}")
    values = dict(said)
    if "logit_bias" in values:
        values["logit_bias"] = dict(
            _fields(pair, "logit_bias", 2) for pair in _list(values["logit_bias"], "logit_bias")
        )
    return SamplingParams(**values)


# --- parts of results -------------------------------------------------------------------------------------------------


def _read_row_result(data: Any) -> RowResult:
    request_id, choice, ids, logprobs, prompt_logprobs, drafts, error = _fields(data, "row", 7)
    return RowResult(
        sequence_id=_sequence_id(request_id, choice, "row"),
        token_ids=_read_ids(ids, "row.token_ids"),
        logprobs=_read_logprobs(logprobs, "row.logprobs"),
        prompt_logprobs=_read_logprobs(prompt_logprobs, "row.prompt_logprobs"),
        drafts=_read_ids(drafts, "row.drafts"),
        error=_text_or_none(error, "row.error"),
    )


def _read_spent(data: Any) -> tuple[str, tuple[float, int]]:
    name, seconds, calls = _fields(data, "spent", 3)
    return _typed(name, str, "spent"), (_typed(seconds, float, "spent"), _count(calls, "spent"))


def _write_logprobs(entries: Sequence[TokenLogprobs]) -> list[Any]:
    return [(each.token_id, each.logprob, each.top) for each in entries]


def _read_logprobs(data: Any, name: str) -> tuple[TokenLogprobs, ...]:
    entries = []
    for each in _list(data, name):
        token_id, logprob, top = _fields(each, name, 3)
        pairs = [_fields(pair, name, 2) for pair in _list(top, name)]
        entries.append(
            TokenLogprobs(
                _typed(token_id, int, name),
                _typed(logprob, float, name),
                tuple((_typed(other, int, name), _typed(value, float, name)) for other, value in pairs),
            )
        )
    return tuple(entries)


# --- plain values -----------------------------------------------------------------------------------------------------


@frozen
class _Reading:
    """Turns whatever is wrong with what is read into one error."""

    what: str

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, ValueError | TypeError | IntarsiaError | RecursionError):
            raise ExecutionError(f"{self.what}: it cannot be read: {error or type(error).__name__}") from error


def _pack(value: Any) -> bytes:
    # A text of a request may hold half a character (a lone surrogate).
    packed: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes) -> Any:
    # Options of logits processors may be maps with numbers for keys.
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


def _fields(data: Any, name: str, count: int) -> list[Any]:
    fields = _list(data, name)
    if len(fields) != count:
        raise ValueError(f"{name}: {len(fields)} fields, not {count}")
    return fields


def _list(data: Any, name: str) -> list[Any]:
    return _typed(data, list, name)  # type: ignore[no-any-return]


def _typed(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name}: {value!r:.40} is no {kind.__name__}")
    return value


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}: {value!r:.40} is not a whole number from 0")
    return value


def _text_or_none(value: Any, name: str) -> str | None:
    return None if value is None else _typed(value, str, name)


def _sequence_id(request_id: Any, choice: Any, name: str) -> SequenceId:
    return _typed(request_id, str, f"{name}.request_id"), _count(choice, f"{name}.choice")


def _read_sequence_ids(data: Any, name: str) -> tuple[SequenceId, ...]:
    pairs = (_fields(each, name, 2) for each in _list(data, name))
    return tuple(_sequence_id(request_id, choice, name) for request_id, choice in pairs)


def _write_ids(ids: Iterable[int]) -> bytes:
    return _little(array("i", ids)).tobytes()


def _read_ids(data: Any, name: str) -> tuple[int, ...]:
    numbers = array("i")
    numbers.frombytes(_typed(data, bytes, name))
    return tuple(_little(numbers))


def _little(numbers: array[int]) -> array[int]:
    """Return the numbers in little-endian order, or from it."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers
