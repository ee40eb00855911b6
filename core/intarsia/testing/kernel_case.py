"""How a contract of kernels calls them: which set, for which dtypes, with which arguments.

Shape legend: T tokens, C in features, N out features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from attrs import evolve

from intarsia.ops import BY_FORMAT
from intarsia.protocols import Kernel, PartContext
from intarsia.testing.caches import tiny_spec
from intarsia.testing.claims import settle, unclaimed
from intarsia.testing.kernel_cache import attending, draw_inputs, draw_write, judge_inputs, judge_write, writing
from intarsia.testing.kernel_calls import Call, normal, on_device
from intarsia.testing.kernel_draws import draw_sampling, judge_sampling
from intarsia.testing.kernel_products import judge_embedding, judge_linear, judge_norm_linear
from intarsia.testing.kernel_rows import ACTIVATIONS, COLLECTIVES, NORMS, ROTATIONS
from intarsia.testing.kernel_weights import read_formats, weight_in
from intarsia.types import Dtype, EngineOptions, Invariance, Provider, Unfit, Weight

__all__ = ["KernelCase"]

_ROW_OPS = {**NORMS, **ROTATIONS, **ACTIVATIONS, **COLLECTIVES}
_HEADS = 4
_EPS = 1e-5
#: Formats of one kernel that claims about more than numbers are tried with.
_SEVERAL = 6


class KernelCase:
    """A set of kernels on trial: subclasses say whose provider it is, and with what it is to be tried.

    Attributes:
        options: the set's own, as a config has them.
        dtypes: of the engines that it is built for; those that it does not fit are left out.
        device: where the kernels run.
        invariance: that such an engine demands.
        float_steps: into how many steps to each side of 0 rows may be rounded where a format asks for activations in
            floats: by default whole numbers of 15 bits, which are finer than float16; 0 is not at all.
        sizes: (rows, out features, in features) of products.
        widths: of rows for the other ops; the last is of long sums.
        many_rows: so many that a grid or a loop over rows has a second round.
        examples: random calls that `test_any_call` tries.
        derandomize: whether it tries the same ones each time.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    dtypes: ClassVar[Sequence[Dtype]] = ("float32", "bfloat16", "float16")
    device: ClassVar[str] = "cpu"
    invariance: ClassVar[Invariance] = "numeric"
    float_steps: ClassVar[int] = 32639
    sizes: ClassVar[Sequence[tuple[int, int, int]]] = (
        *((1, 1, 1), (1, 33, 70), (2, 48, 64), (9, 130, 257), (7, 64, 576), (33, 20, 100)),
        *((1, 7, 4100), (130, 96, 31), (1030, 3, 9)),
    )
    widths: ClassVar[Sequence[int]] = (1, 3, 16, 33, 64, 100, 576, 1537, 8200)
    many_rows: ClassVar[int] = 1030
    examples: ClassVar[int] = 40
    derandomize: ClassVar[bool] = False

    def provider(self) -> Provider:
        """Return the provider of the set."""
        raise NotImplementedError("return the kernels' provider: my_plugin.provide_kernels()[0]")

    def weight(self, name: str, outs: int, ins: int, dtype: torch.dtype, seed: int) -> Weight:
        """Return a random weight in a format that a kernel reads; override it for formats of your own.

        Args:
            name: of the format.
            outs: out features, its rows.
            ins: in features, its columns.
            dtype: of the engine.
            seed: decides the numbers.
        """
        made = weight_in(name, outs, ins, dtype, seed)
        if made is None:
            raise NotImplementedError(f"return a random weight in the format {name!r}, which a kernel says it reads")
        return made

    # --- which kernels ----------------------------------------------------------------------------------------------

    def context(self, dtype: Dtype) -> PartContext:
        """Return what the set is built from for an engine of this dtype."""
        engine = EngineOptions(max_model_len=64, device=self.device, dtype=dtype, threads=1, invariance=self.invariance)
        options = settle(self.provider(), "kernels", dict(self.options))
        return PartContext(options=options, engine=engine, spec=tiny_spec(2), num_ids=64)

    def built(self, dtype: Dtype) -> Sequence[Kernel] | Unfit:
        """Return the set for an engine of this dtype, or why it does not fit one."""
        context = self.context(dtype)
        fit = self.provider().fit(context)
        kernels: Sequence[Kernel] = () if isinstance(fit, Unfit) else self.provider().build(context).kernels()
        return fit if isinstance(fit, Unfit) else kernels

    def sets(self) -> Iterator[tuple[Dtype, Sequence[Kernel]]]:
        """Yield each dtype that the set fits, with the kernels that such an engine takes."""
        reasons, fits = [], 0
        for dtype in self.dtypes:
            kernels = self.built(dtype)
            if isinstance(kernels, Unfit):
                reasons.append(kernels.reason)
                continue
            fits += 1
            yield dtype, [kernel for kernel in kernels if not kernel.dtypes or dtype in kernel.dtypes]
        if not fits:
            unclaimed(f"it fits no engine here: {'; '.join(dict.fromkeys(reasons))}")

    def kernels(self, ops: Sequence[str]) -> Iterator[tuple[Dtype, Kernel]]:
        """Yield the kernels of some ops with each dtype; where there are none, nothing is claimed of them."""
        found = 0
        for dtype, kernels in self.sets():
            for kernel in kernels:
                if kernel.op in ops:
                    found += 1
                    yield dtype, kernel
        if not found:
            unclaimed(f"it has no kernel of {', '.join(ops)}")

    # --- which calls ------------------------------------------------------------------------------------------------

    def calls(
        self,
        kernel: Kernel,
        dtype: Dtype,
        *,
        rows: int = 5,
        width: int = 70,
        outs: int = 33,
        seed: int = 1,
        every: bool = False,
    ) -> Iterator[Call]:
        """Yield calls of one kernel, of each format that it reads.

        Args:
            kernel: whose calls they are.
            dtype: of the engine.
            rows: how many tokens.
            width: of a row.
            outs: out features, of products.
            seed: decides the numbers, and which variants of the op are tried.
            every: try every format that it reads, and not only some.
        """
        floats: torch.dtype = getattr(torch, dtype)
        make = partial(Call, kernel=kernel, device=self.device)
        if kernel.op in _ROW_OPS:
            op = _ROW_OPS[kernel.op]
            arguments = op.draw(rows, width, floats, seed)
            yield make(said=dtype, arguments=arguments, rows=op.rows, judge=op.judge, call=kernel.call)
        elif kernel.op in BY_FORMAT:
            for name in self._formats(kernel, every=every):
                yield from self._weighted(kernel, floats, name, (rows, outs, width), seed)
        elif kernel.op == "sample_rows":
            drawn = draw_sampling(rows, width, seed)
            yield make(said=dtype, arguments=drawn, rows=tuple(range(6)), judge=judge_sampling, call=kernel.call)
        else:
            yield from self._writing(kernel, floats, rows, width, seed)

    def _formats(self, kernel: Kernel, *, every: bool) -> Sequence[str]:
        names = read_formats(kernel.formats)
        return names if every else names[:: -(-len(names) // _SEVERAL)]

    def _weighted(
        self, kernel: Kernel, dtype: torch.dtype, name: str, size: tuple[int, int, int], seed: int
    ) -> Iterator[Call]:
        """Yield calls over a weight in one format, as it is and packed."""
        rows, outs, ins = size
        weight = self.weight(name, outs, ins, dtype, seed)
        make = partial(Call, kernel=kernel, call=kernel.call, device=self.device)
        if kernel.op == "embedding":
            ids = torch.randint(0, outs, (rows,), generator=torch.Generator().manual_seed(seed))
            judge = judge_embedding(weight)
            yield make(said=f"{name}, {dtype}", arguments=(ids, weight, dtype), rows=(0,), judge=judge)
            return
        x, bias = normal(seed, rows, ins, dtype=dtype), normal(seed + 1, outs, dtype=dtype) if seed % 2 else None
        for said, stored in self._stored(kernel, weight, str(dtype).removeprefix("torch.")):
            if kernel.op == "linear":
                judge = judge_linear(weight, self.float_steps)
                yield make(said=said, arguments=(x, stored, bias), rows=(0,), judge=judge)
                continue
            residual = normal(seed + 2, rows, ins, dtype=dtype) if seed % 3 else None
            arguments = (x, residual, normal(seed + 3, ins, dtype=dtype), _EPS, stored, bias)
            places, judge = (0,) if residual is None else (0, 1), judge_norm_linear(weight, self.float_steps)
            yield make(said=said, arguments=arguments, rows=places, judge=judge)

    def _stored(self, kernel: Kernel, weight: Weight, dtype: str) -> Iterator[tuple[str, Weight]]:
        """Yield a weight as it is, and as the set's `linear` for its format packs it."""
        said, name = f"{weight.format.name}, {dtype}", weight.format.name
        yield said, weight
        pack = kernel.pack
        if kernel.op != "linear":
            offered = (each for found, kernels in self.sets() if found == dtype for each in kernels)
            pack = next((each.pack for each in offered if each.op == "linear" and name in each.formats), None)
        if pack is not None:
            yield f"{said}, packed", pack(on_device(weight, self.device))

    def _writing(self, kernel: Kernel, dtype: torch.dtype, rows: int, width: int, seed: int) -> Iterator[Call]:
        """Yield calls that write the cache, in each order and entry format."""
        entries = {dtype, *(getattr(torch, name) for name in kernel.formats)}
        for order in sorted(kernel.orders):
            for entry in sorted(entries, key=str):
                said = f"{dtype}, {order}, entries of {entry}"
                if kernel.op == "cache_write":
                    call = writing(kernel, entry, order, 2 * rows + 3)
                    drawn, judge = draw_write(rows, width, dtype, seed), judge_write(entry)
                    places: tuple[int, ...] = (0, 1, 2)
                else:
                    call = attending(kernel, entry, order, _HEADS, 2 * rows + 3)
                    drawn, judge = draw_inputs(rows, width, dtype, seed, _HEADS), judge_inputs(entry, _HEADS)
                    places = (0, 4) if drawn[2] is None else (0, 2, 3, 4)
                yield Call(kernel, said, drawn, places, judge, call, self.device)


def spread(call: Call) -> Call:
    """Return the call with rows that are parts of something wider, whose other numbers are NaN."""
    others: dict[int, Any] = {}
    for place in call.rows:
        narrow = call.arguments[place]
        if narrow.dim() == 1:  # ids, slots and the like lie end to end
            continue
        wide = torch.full((len(narrow) + 3, *narrow.shape[1:-1], narrow.shape[-1] + 7), torch.nan, dtype=narrow.dtype)
        others[place] = wide[2:-1, ..., 3:-4]
        others[place].copy_(narrow)
    return evolve(call, said=f"{call.said}, rows that are parts of wider ones").having(others)
