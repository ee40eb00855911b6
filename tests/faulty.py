"""A plugin with a part for every slot that works, until one of its methods is armed: then that raises."""

from __future__ import annotations

import types
from typing import Any

import click
from attrs import evolve, field, frozen

import intarsia_inflight
import intarsia_int8
import intarsia_paged
from intarsia import defaults
from intarsia.hookspecs import KINDS, hookimpl
from intarsia.protocols import Drafter, Frontend, Kernel, LogitsProcessor
from intarsia.testing import scripted
from intarsia.types import Draft, Fit, Provider, Weight

#: slot and method -> what it raises.
ARMED: dict[tuple[str, str], BaseException] = {}


def strike(slot: str, method: str) -> None:
    """Raise what is armed for a method."""
    error = ARMED.get((slot, method))
    if error is not None:
        raise error


def failing(slot: str, name: str, inner: Any, *, is_property: bool = False) -> Any:
    """Return a method that raises where it is armed, in a frame of its own name."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        strike(slot, name)
        return getattr(self.inner, name) if is_property else getattr(self.inner, name)(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return property(call) if is_property else call


def watched(slot: str, part: Any) -> Any:
    """Return a part that does what another does, and fails where that is armed."""
    protocol = {kind.slot: kind.part for kind in KINDS}[slot]
    members = {
        name: failing(slot, name, part, is_property=isinstance(value, property))
        for name, value in vars(protocol).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property))
    }
    others = {"__getattr__": lambda self, name: getattr(self.inner, name)}
    cls = types.new_class("Watched", exec_body=lambda namespace: namespace.update(members | others))
    cls.__module__ = __name__
    made = cls()
    made.inner = part
    return made


def provider(slot: str, inner: Provider) -> Provider:
    """Return a provider of a watched part."""
    return evolve(inner, key="broken", fit=lambda context: Fit(0), build=lambda c: watched(slot, inner.build(c)))


@frozen
class Tensors:
    """A checkpoint whose tensors cannot be read where that is armed."""

    inner: Any
    tensors: dict[str, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "tensors", {name: Tensor(each) for name, each in self.inner.tensors.items()})

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@frozen
class Tensor:
    inner: Any

    def read(self, out: Any) -> None:
        strike("loader", "read")
        self.inner.read(out)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@frozen
class Opens:
    inner: Any

    def open(self) -> Any:
        strike("loader", "open")
        return Tensors(self.inner.open())


class Guesses(Drafter):
    def start(self, target: Any) -> None:
        strike("drafter", "start")

    def propose(self, requests: Any) -> Any:
        strike("drafter", "propose")
        return [Draft((7,)) for _ in requests]


class Edits(LogitsProcessor):
    def applies(self, params: Any) -> bool:
        strike("logits_processors", "applies")
        return params.seed == 13

    def prepare(self, params: Any) -> None:
        strike("logits_processors", "prepare")

    def open(self, params: Any, num_prompt: int) -> Any:
        strike("logits_processors", "open")
        return self

    def process(self, token_ids: Any, logits_V: Any) -> None:
        strike("logits_processors", "process")


class Sums:
    def kernels(self) -> list[Kernel]:
        strike("kernels", "kernels")
        return [Kernel(op="silu_mul", call=silu_mul), Kernel(op="linear", call=linear, formats=frozenset({"dense"}))]


def silu_mul(gate_up: Any) -> Any:
    from intarsia.ops import silu_mul as reference

    strike("kernels", "silu_mul")
    return reference(gate_up)


def linear(x: Any, weight: Weight, bias: Any = None) -> Any:
    from intarsia.ops import linear as reference

    return reference(x, weight, bias)


class Serves(Frontend):
    def serve(self) -> None:
        strike("frontend", "serve")


class Orders:
    def command(self) -> click.Command:
        return click.Command("broken", callback=lambda: strike("commands", "run"))


def simple(cls: type) -> Provider:
    return Provider(key="broken", summary="breaks", fit=lambda context: Fit(0), build=lambda context: cls())


def first(providers: list[Provider], key: str) -> Provider:
    return next(each for each in providers if each.key == key)


def loader() -> Provider:
    inner = first(defaults.provide_loaders(), "safetensors")
    return evolve(inner, key="broken", fit=lambda context: Fit(0), build=lambda c: Opens(inner.build(c)))


OFFERS = {
    "loader": loader(),
    "family": provider("family", first(defaults.provide_models(), "llama")),
    "quantizer": provider("quantizer", first(intarsia_int8.provide_quantizers(), "int8")),
    "kernels": simple(Sums),
    "attention": provider("attention", first(defaults.provide_attention_backends(), "sdpa")),
    "cache": provider("cache", first(intarsia_paged.provide_cache_allocators(), "paged")),
    "runner": provider("runner", first(scripted.provide_runners(), "scripted")),
    "drafter": simple(Guesses),
    "logits_processors": simple(Edits),
    "scheduler": provider("scheduler", first(intarsia_inflight.provide_schedulers(), "inflight")),
    "executor": provider("executor", first(defaults.provide_executors(), "local")),
    "frontend": simple(Serves),
    "commands": simple(Orders),
}
for kind in KINDS:
    globals()[kind.hook] = hookimpl(lambda slot=kind.slot: [OFFERS[slot]])
