"""`intarsia bench micro`: the sampler and the detokenizer alone, on one core, with no model.

Logits are normal numbers, fixed by a seed, and are copied before each step outside of the time: the sampler changes
them, and in an engine a matrix product has just written them. The limit of sampling is to read the logits once, at the
bandwidth that one core has for a buffer of their size, from cache or memory. Detokenizing has none: a token's text is a
few bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import Factory, define, evolve, field, frozen

from intarsia.cli.terminal import table
from intarsia.sampling import Sampler
from intarsia.text import TextStream, Tokenizer
from intarsia.types import Entered, Row, SamplingDefaults, SamplingParams
from intarsia_bench.limits import Meter

if TYPE_CHECKING:
    from rich.table import Table

ROWS = 16
VOCAB = 49_152
#: Tokens of a prompt, which penalties count.
_PROMPT = 256
#: Of the normal logits; a head's are about as wide.
_SCALE = 3.0
_WARM_UP = 3

#: Name -> parameters of each of the rows.
SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "temperature, top-k": SamplingParams(temperature=0.8, top_k=50),
    "temperature, top-p": SamplingParams(temperature=0.8, top_p=0.9),
    "temperature, top-k, top-p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        typical_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        logit_bias={100: -5.0, 200: 1.0},
        banned_token_ids=(300,),
        min_tokens=1000,
    ),
}
#: Name -> stop strings.
DETOKENIZING: dict[str, tuple[str, ...]] = {
    "detokenizing": (),
    "detokenizing, stop strings": ("\n\n\n", "</tool_call>", "User:"),
}
#: Targets of the project, in microseconds: a step's sampling, and a token's text.
TARGETS_US = {
    "greedy": 300.0,
    "temperature, top-k, top-p": 2000.0,
    "detokenizing": 20.0,
    "detokenizing, stop strings": 20.0,
}
_TEXT = (
    "The joiner cut each piece to fit, then laid it in the panel.\n\n조각을 하나씩 맞췄다; 木片を一枚ずつ"
    "はめ込んだ。 for piece in range(3):\n    print(piece, end='…')  # déjà vu \U0001f600\n"
)
_MIN_TOKENS = 2000


@frozen(kw_only=True)
class Timing:
    """How long one thing takes.

    Attributes:
        unit: `step` of all rows, or `token`.
        seconds: of each repeat, of one unit.
        limit_s: the least that the machine allows; None where no limit says anything.
    """

    name: str
    unit: str
    seconds: tuple[float, ...]
    limit_s: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as data for JSON, in microseconds."""
        median = statistics.median(self.seconds)
        found: dict[str, Any] = {
            "name": self.name,
            "unit": self.unit,
            "median_us": round(1e6 * median, 3),
            "min_us": round(1e6 * min(self.seconds), 3),
            "max_us": round(1e6 * max(self.seconds), 3),
            "repeats": len(self.seconds),
        }
        if self.name in TARGETS_US:
            found["target_us"] = TARGETS_US[self.name]
        if self.limit_s is not None:
            found |= {"limit_us": round(1e6 * self.limit_s, 3), "times_limit": round(median / self.limit_s, 2)}
        return found


@define
class SamplingSteps:
    """Steps of equal rows that each choose one token, as a decoding engine has them."""

    params: SamplingParams
    num_rows: int = ROWS
    vocab: int = VOCAB
    _sampler: Sampler = field(init=False)
    _logits_LV: torch.Tensor = field(init=False)
    _rows: list[Row] = field(init=False, factory=list)

    def __attrs_post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self._logits_LV = _SCALE * torch.randn(self.num_rows, self.vocab, generator=random)
        self._sampler = Sampler(self.vocab)
        prompts = torch.randint(self.vocab, (self.num_rows, _PROMPT), generator=random).tolist()
        for index, prompt in enumerate(prompts):
            entered = Entered(
                sequence_id=(f"micro-{index}", 0),
                params=self.params.filled(SamplingDefaults()),
                seed=index,
                token_ids=tuple(prompt),
                num_prompt=len(prompt),
                stop_ids=frozenset({0, 2}),
            )
            self._sampler.enter(entered)
            row = Row(sequence_id=entered.sequence_id, token_ids=(prompt[-1],), start=len(prompt) - 1)
            self._rows.append(row)

    def run(self) -> float:
        """Choose a token for each row; return the seconds that it took."""
        logits_LV = self._logits_LV.clone()
        start = time.perf_counter()
        results = self._sampler.choose(self._rows, logits_LV)
        seconds = time.perf_counter() - start
        for result in results:
            assert result.error is None and len(result.token_ids) == 1, result
        self._rows = [
            evolve(row, token_ids=result.token_ids, start=row.start + 1)
            for row, result in zip(self._rows, results, strict=True)
        ]
        return seconds


@frozen
class Detokenizing:
    """A text's ids pushed one by one, as a decoding engine does."""

    tokenizer: Tokenizer
    stop: tuple[str, ...]
    ids: list[int] = field(default=Factory(lambda self: _some_ids(self.tokenizer), takes_self=True))

    def run(self) -> float:
        """Return the seconds that a token takes."""
        stream = TextStream.open(self.tokenizer, SamplingParams(stop=self.stop))
        start = time.perf_counter()
        for token in self.ids:
            stream.push((token,))
        stream.finish()
        seconds = time.perf_counter() - start
        assert not stream.stopped, "a stop string is in the text"
        return seconds / len(self.ids)


def _some_ids(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(_TEXT)
    return ids * (1 + _MIN_TOKENS // len(ids))


def measure(tokenizer: Tokenizer | None, repeats: int, *, num_rows: int = ROWS, vocab: int = VOCAB) -> list[Timing]:
    """Measure all cases; those of text where there is a tokenizer."""
    found = []
    with _one_thread():
        limit_s = _limit(num_rows * vocab * torch.float32.itemsize)
        for name, params in SAMPLING.items():
            steps = SamplingSteps(params, num_rows, vocab)
            found.append(Timing(name=name, unit="step", seconds=_repeated(steps, repeats), limit_s=limit_s))
        for name, stop in DETOKENIZING.items() if tokenizer is not None else ():
            assert tokenizer is not None
            found.append(Timing(name=name, unit="token", seconds=_repeated(Detokenizing(tokenizer, stop), repeats)))
    return found


def _repeated(case: SamplingSteps | Detokenizing, repeats: int) -> tuple[float, ...]:
    for _ in range(_WARM_UP):
        case.run()
    return tuple(case.run() for _ in range(repeats))


def _limit(num_bytes: int) -> float:
    """Return the least seconds in which a core reads so many bytes, again and again."""
    meter = Meter((), buffer_bytes=-(-num_bytes // 4096) * 4096)
    for _ in range(10):
        meter.sample()
    return num_bytes / meter.limits.bytes_per_s


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- what is printed --------------------------------------------------------------------------------------------------


def micro_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Show the timings, as `Timing.plain` gives them, beside targets and limits."""
    listed = table("what", "median", "min..max", "target", "limit", "times limit", whole=("what",))
    for row in measured:
        listed.add_row(
            row["name"],
            f"{row['median_us']:.1f} us/{row['unit']}",
            f"{row['min_us']:.1f}..{row['max_us']:.1f}",
            f"{row['target_us']:.0f} us" if "target_us" in row else "",
            f"{row['limit_us']:.1f} us" if "limit_us" in row else "",
            f"{row['times_limit']:.1f}x" if "times_limit" in row else "",
        )
    return listed


def notes(repeats: int) -> list[str]:
    """Say what was measured."""
    return [
        f"sampling: a step of {ROWS} rows of {VOCAB} fp32 logits, a token chosen for each; one core, {repeats} repeats",
        "limit: to read the logits once, at the bandwidth that one core has for a buffer of their size",
    ]
