"""How well models predict a text: perplexity over strided windows, and how far two compositions are apart.

A window's first tokens are seen with little before them, so windows overlap, and each scores only the tokens that the
one before did not: the fixed-length approximation of Hugging Face's "Perplexity of fixed-length models". The first
token of the text is not scored, and where windows do not overlap the first of each.

Shape legend: L scored tokens, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from attrs import define, frozen

from intarsia.errors import ConfigError, ExecutionError
from intarsia.forwarding import ComposedModel
from intarsia.protocols import Progress

#: Probabilities in float64 that are in memory at once, in numbers: 8 MiB a model. Larger tensors are taken from the
#: system and given back each time, which costs half as much again.
_PROBABILITIES = 1 << 20
#: Mean negative log-likelihoods beyond it have no perplexity that a float holds.
_LARGEST_NLL = 709.0


@frozen
class Window:
    """Tokens of the text from `start` to `stop`, of which those from `first` on are scored."""

    start: int
    first: int
    stop: int


@frozen(kw_only=True)
class Score:
    """How well one model predicts.

    Attributes:
        nll: mean negative log-likelihood of a token, in nats.
        num_tokens: how many were scored.
    """

    nll: float
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-likelihood."""
        return math.exp(self.nll) if self.nll < _LARGEST_NLL else math.inf


@frozen(kw_only=True)
class Comparison:
    """How two models predict the same tokens.

    Attributes:
        a, b: their scores.
        mean_kl, max_kl: KL(A || B) over the tokens, in nats.
        agreement: at which share of the tokens the likeliest next one is the same.
        log_ratio: mean difference of negative log-likelihoods, B's less A's: the log of the perplexities' ratio.
        log_ratio_error: its standard error, as if tokens were independent.
    """

    a: Score
    b: Score
    mean_kl: float
    max_kl: float
    agreement: float
    log_ratio: float
    log_ratio_error: float


def windows(num_tokens: int, window: int, stride: int) -> list[Window]:
    """Cut a text into windows that begin `stride` tokens apart; the last ends where the text does."""
    found: list[Window] = []
    for start in range(0, num_tokens, stride):
        stop = min(start + window, num_tokens)
        # The window before has scored what lies before its end; nothing predicts a window's first token.
        first = max(start + 1, found[-1].stop if found else 0)
        if first < stop:
            found.append(Window(start, first, stop))
        if stop == num_tokens:
            break
    return found


def perplexity(
    model: ComposedModel, token_ids: Sequence[int], *, window: int, stride: int, progress: Progress
) -> Score:
    """Score a text.

    Args:
        model: started.
        token_ids: the text.
        window: tokens that are seen at once.
        stride: tokens between the beginnings of windows.
        progress: told of the tokens that are scored.

    Raises:
        ConfigError: a window is longer than the model takes, the stride longer than a window, or the text too short.
        ExecutionError: logits are not finite.
    """
    total, count = 0.0, 0
    for targets_L, (logits_LV,) in _predictions([model], token_ids, window, stride, progress):
        total += _nll(_log_probabilities(logits_LV), targets_L).sum().item()
        count += len(targets_L)
    return Score(nll=total / count, num_tokens=count)


def compare(
    model: ComposedModel,
    other: ComposedModel,
    token_ids: Sequence[int],
    *,
    window: int,
    stride: int,
    progress: Progress,
) -> Comparison:
    """Score a text by two models that have the same vocabulary, A and B, and say how far they are apart.

    Args and errors are those of `perplexity`; besides

    Raises:
        ConfigError: the vocabularies differ.
    """
    sizes = [each.parts.spec.vocab_size for each in (model, other)]
    if sizes[0] != sizes[1]:
        raise ConfigError(f"compare: the models have vocabularies of {sizes[0]} and of {sizes[1]} ids; it takes one")
    tally = _Tally()
    for targets_L, (logits_LV, others_LV) in _predictions([model, other], token_ids, window, stride, progress):
        tally.add(_log_probabilities(logits_LV), _log_probabilities(others_LV.to(logits_LV.device)), targets_L)
    return tally.comparison()


@define
class _Tally:
    """Sums over tokens, in float64."""

    count: int = 0
    nll_a: float = 0.0
    nll_b: float = 0.0
    squares: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    agreeing: int = 0

    def add(self, a_LV: torch.Tensor, b_LV: torch.Tensor, targets_L: torch.Tensor) -> None:
        nll_a, nll_b = _nll(a_LV, targets_L), _nll(b_LV, targets_L)
        self.count += len(targets_L)
        self.nll_a += nll_a.sum().item()
        self.nll_b += nll_b.sum().item()
        self.squares += (nll_b - nll_a).square().sum().item()
        self.agreeing += int((a_LV.argmax(-1) == b_LV.argmax(-1)).sum())
        # Below zero by rounding alone.
        kl_L = (a_LV.exp() * (a_LV - b_LV)).sum(-1).clamp(min=0)
        self.kl += kl_L.sum().item()
        self.max_kl = max(self.max_kl, kl_L.max().item())

    def comparison(self) -> Comparison:
        count = self.count
        ratio = (self.nll_b - self.nll_a) / count
        variance = max(0.0, self.squares / count - ratio**2)
        return Comparison(
            a=Score(nll=self.nll_a / count, num_tokens=count),
            b=Score(nll=self.nll_b / count, num_tokens=count),
            mean_kl=self.kl / count,
            max_kl=self.max_kl,
            agreement=self.agreeing / count,
            log_ratio=ratio,
            log_ratio_error=math.sqrt(variance / count),
        )


def check_windows(model: ComposedModel, num_tokens: int, window: int, stride: int) -> None:
    """Check that a text can be scored; `perplexity` and `compare` do. Weights need not be there.

    Raises:
        ConfigError: as of `perplexity`.
    """
    max_len = model.parts.engine.max_model_len
    assert max_len is not None
    if window > max_len:
        raise ConfigError(f"window: {window} is more than the {max_len} tokens of engine.max_model_len", field="window")
    if window < 2:
        raise ConfigError(f"window: {window} is too short; a token and one before it are 2 at least", field="window")
    if not 1 <= stride <= window:
        raise ConfigError(f"stride: {stride} is not from 1 to the window's {window} tokens", field="stride")
    if num_tokens < 2:
        count = "no token" if num_tokens == 0 else "one token, and nothing before it to predict it from"
        raise ConfigError(f"text: it has {count}; 2 are scored at least", field="text")


def _predictions(
    models: Sequence[ComposedModel], token_ids: Sequence[int], window: int, stride: int, progress: Progress
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Yield ids (L,) and each model's logits (L, V) for them, few at a time."""
    for model in models:
        check_windows(model, len(token_ids), window, stride)
        model.check_ids(token_ids)
    found = windows(len(token_ids), window, stride)
    total, done = sum(each.stop - each.first for each in found), 0
    for each in found:
        # A token's logits are those of the token before it.
        seen, position = token_ids[each.start : each.stop - 1], each.first
        runs = [model.logits(seen, each.first - 1 - each.start) for model in models]
        for chunks in zip(*runs, strict=True):
            rows = max(1, _PROBABILITIES // chunks[0].shape[1])
            for pieces in zip(*(chunk.split(rows) for chunk in chunks), strict=True):
                targets = token_ids[position : position + len(pieces[0])]
                yield torch.tensor(targets, device=pieces[0].device), pieces
                position += len(targets)
            done += len(chunks[0])
            progress("scoring", done, total)
        assert position == each.stop


def _log_probabilities(logits_LV: torch.Tensor) -> torch.Tensor:
    """Return them in float64; raise ExecutionError where logits are not finite."""
    if not logits_LV.isfinite().all():
        raise ExecutionError("the model's logits are not finite on this text; engine.dtype = 'float32' may help")
    return torch.log_softmax(logits_LV.double(), dim=-1)


def _nll(log_probabilities_LV: torch.Tensor, targets_L: torch.Tensor) -> torch.Tensor:
    return -log_probabilities_LV.gather(1, targets_L.unsqueeze(1)).squeeze(1)
