"""Calibrating: a dense model runs over text while its linear layers' inputs are observed.

What comes out is `intarsia.quantizing.calibration`, which methods read that need to know activations: SmoothQuant, AWQ,
Wanda.

Shape legend: T tokens, C in features, N out features, M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from attrs import define, evolve, field

from intarsia.errors import ConfigError, ExecutionError
from intarsia.executor import LocalExecutor
from intarsia.forwarding import ComposedModel
from intarsia.models.eager import EagerRunner
from intarsia.models.weights import Weights
from intarsia.ops import OpChoice, Ops
from intarsia.protocols import ExecutorContext, Kernel, Progress, RunnerContext
from intarsia.quantizing.calibration import Calibration, InputStatistics
from intarsia.types import EMBED, HEAD, POSITIONS, Choice, EngineConfig, Weight

#: Tokens of each linear's inputs that are kept.
_SAMPLED = 512


def calibrate(
    config: EngineConfig,
    text: str,
    *,
    tokens: int,
    window: int,
    progress: Progress,
    plugins: Mapping[str, object] | Sequence[object] = (),
) -> Calibration:
    """Run a model over windows that are spread evenly over a text; return what its linear layers are given.

    The model runs dense: what the config says of quantizers, stored weights, runner and executor does not count.

    Args:
        config: of the model.
        text: what it reads.
        tokens: how many to run at most.
        window: tokens of a sequence at most.
        progress: told of loading, then of tokens that ran.
        plugins: plugins of this process, besides those that are installed.

    Raises:
        IntarsiaError: as of `ComposedModel.compose` and `.encode`.
        ConfigError: the text is empty, or a window is longer than the model takes.
        ExecutionError: inputs are not finite.
    """
    composed = ComposedModel.compose(_dense(config), plugins)
    max_len = composed.parts.engine.max_model_len
    assert max_len is not None
    if window > max_len:
        raise ConfigError(f"window: {window} is more than the {max_len} tokens of engine.max_model_len", field="window")
    ids = composed.encode(text)
    if not ids:
        raise ConfigError("text: it is empty; calibration needs some", field="text")
    sequences = _sequences(ids, tokens, window, _bos(composed))
    observer = Observer()
    context = composed.executor.context
    ops = observed(context.ops, observer.see)
    executor = LocalExecutor(evolve(context, ops=ops, build_runner=partial(_build, context, ops, observer)))
    with ComposedModel(composed.parts, executor) as model:
        model.start(progress)
        observer.begin()
        done, total = 0, sum(map(len, sequences))
        for sequence in sequences:
            for logits in model.logits(sequence):
                done += len(logits)
                progress("calibrating", done, total)
    return Calibration(observer.statistics(), _name(config.model.use), total)


def observed(ops: Ops, see: Callable[[Weight, torch.Tensor], None]) -> Ops:
    """Return the ops with a `linear` that shows each weight and its inputs (T, C) before it computes."""

    def watched(kernel: Kernel) -> Kernel:
        def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
            see(weight, x_TC)
            result: torch.Tensor = kernel.call(x_TC, weight, bias_N)
            return result

        return evolve(kernel, call=linear)

    return Ops(
        {
            name: OpChoice(watched(choice.kernel), choice.source) if name.startswith("linear[") else choice
            for name, choice in ops.choices.items()
        }
    )


@define(eq=False)
class Sample:
    """Up to `_SAMPLED` of a linear's inputs, each token as likely as another wherever it stands in the text.

    A token draws a random number as it comes, and those with the smallest are kept. The seed is the same for all, so
    that linears which see every token keep the same ones.

    Attributes:
        rows: (M, C), in bfloat16, in no order.
    """

    rows: torch.Tensor
    _places: torch.Tensor = field(factory=partial(torch.empty, 0, dtype=torch.int64), init=False)
    _draws: torch.Tensor = field(factory=partial(torch.empty, 0, dtype=torch.float64), init=False)
    _random: torch.Generator = field(factory=lambda: torch.Generator().manual_seed(0), init=False)

    def offer(self, x_TC: torch.Tensor, start: int) -> None:
        """Take those of the tokens from `start` on that are kept, in the place of those that are not any more."""
        held = len(self.rows)
        draws = torch.rand(len(x_TC), dtype=torch.float64, generator=self._random)
        kept = torch.cat((self._draws, draws)).topk(min(_SAMPLED, held + len(x_TC)), largest=False).indices
        dropped = torch.ones(held, dtype=torch.bool)
        dropped[kept[kept < held]] = False
        slots, new = dropped.nonzero().flatten(), kept[kept >= held] - held
        rows, places, draws = x_TC[new.to(x_TC.device)].bfloat16(), new + start, draws[new]
        again = len(slots)
        self.rows[slots.to(x_TC.device)], self._places[slots], self._draws[slots] = (
            rows[:again],
            places[:again],
            draws[:again],
        )
        if again < len(new):  # it is not full yet
            self.rows = torch.cat((self.rows, rows[again:]))
            self._places = torch.cat((self._places, places[again:]))
            self._draws = torch.cat((self._draws, draws[again:]))

    def ordered(self) -> torch.Tensor:
        """Return the rows in the order of the text, on the CPU."""
        return self.rows.cpu()[self._places.argsort()]


@define(eq=False)
class Inputs:
    """What one linear was given so far.

    Attributes:
        largest: (C,), the largest magnitudes.
        squares: (C,), sums of squares, in float64.
        sample: some of the inputs.
        num_rows: tokens that were seen.
    """

    largest: torch.Tensor
    squares: torch.Tensor
    sample: Sample
    num_rows: int = 0

    @classmethod
    def none(cls, columns: int, device: torch.device) -> Inputs:
        """Begin without any."""
        return cls(
            largest=torch.zeros(columns, device=device),
            squares=torch.zeros(columns, dtype=torch.float64, device=device),
            sample=Sample(torch.empty((0, columns), dtype=torch.bfloat16, device=device)),
        )

    def add(self, x_TC: torch.Tensor) -> None:
        """Count the inputs of some tokens."""
        x_TC = x_TC.float()
        self.largest = torch.maximum(self.largest, x_TC.abs().amax(dim=0))
        self.squares += x_TC.square().sum(dim=0, dtype=torch.float64)
        self.sample.offer(x_TC, self.num_rows)
        self.num_rows += len(x_TC)

    def statistics(self, name: str) -> InputStatistics:
        """Return what was seen; zeros and no sample where nothing was. Raise ExecutionError where it is not finite."""
        if not (self.largest.isfinite().all() and self.squares.isfinite().all()):
            raise ExecutionError(f"the inputs of {name} are not finite on this text; engine.dtype = 'float32' may help")
        mean_square = (self.squares / max(1, self.num_rows)).float()
        return InputStatistics(self.largest.cpu(), mean_square.cpu(), self.sample.ordered())


@define(eq=False)
class Observer:
    """Sees every product of a running model, and knows the linear by its weight."""

    _weights: Weights = field(factory=dict, init=False)
    _names: dict[int, str] = field(factory=dict, init=False)
    _inputs: dict[str, Inputs] = field(factory=dict, init=False)

    def meet(self, weights: Weights) -> None:
        """Take the model's weights, which stay the same objects from now on."""
        self._weights = weights

    def begin(self) -> None:
        """Observe from now on: what ran before warmed the model up."""
        for name, weight in self._weights.items():
            # A head that is tied reads the embedding, whose rows are otherwise looked up.
            linear = "head" if name == EMBED and HEAD not in self._weights else name.removesuffix(".weight")
            if isinstance(weight, Weight) and name != POSITIONS and (name != EMBED or linear == "head"):
                device = next(iter(weight.tensors.values())).device
                self._names[id(weight)] = linear
                self._inputs[linear] = Inputs.none(weight.shape[1], device)

    def see(self, weight: Weight, x_TC: torch.Tensor) -> None:
        """Count a product's inputs."""
        name = self._names.get(id(weight))
        if name is not None:
            self._inputs[name].add(x_TC)

    def statistics(self) -> dict[str, InputStatistics]:
        """Return what was seen, by canonical name."""
        return {name: inputs.statistics(name) for name, inputs in self._inputs.items()}


def unseen(calibration: Calibration) -> list[str]:
    """Return the linears that no token reached: experts that the text did not need."""
    return [name for name, inputs in calibration.inputs.items() if not len(inputs.sample)]


def _dense(config: EngineConfig) -> EngineConfig:
    return evolve(
        config,
        model=evolve(config.model, weights="dense"),
        quantizer=(),
        runner=Choice("eager"),
        executor=Choice("local"),
    )


def _build(context: ExecutorContext, ops: Ops, observer: Observer, weights: Weights) -> EagerRunner:
    observer.meet(weights)
    return EagerRunner.build(
        RunnerContext(
            engine=context.engine,
            spec=context.spec,
            num_ids=context.num_ids,
            tokenizer=context.tokenizer,
            layout=context.layout,
            ops=ops,
            attention=context.attention,
            weights=weights,
        )
    )


def _bos(composed: ComposedModel) -> list[int]:
    """Return what every prompt begins with."""
    tokenizer = composed.parts.tokenizer
    return [tokenizer.bos_id] if tokenizer.add_bos else []


def _sequences(ids: Sequence[int], tokens: int, window: int, bos: list[int]) -> list[list[int]]:
    """Return equal sequences, spread over the ids, that are as long together as asked for or the text allows."""
    total = min(tokens, len(ids))
    room = window - len(bos)
    number = -(-total // room)
    starts = [index * len(ids) // number for index in range(number)]
    lengths = [total * (index + 1) // number - total * index // number for index in range(number)]
    pieces = [list(ids[start : start + length]) for start, length in zip(starts, lengths, strict=True)]
    return [piece if piece[:1] == bos else bos + piece for piece in pieces]


def _name(reference: str) -> str:
    """Return what the model is called, without the folders of this machine."""
    return Path(reference).name if Path(reference).exists() else reference
