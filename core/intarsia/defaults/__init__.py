"""Plain parts, registered as a plugin like any other: with no other plugin allowed the core still runs.

The naive engine: static batching over a cache that reserves the maximum, attention and ops through torch. It is the
oracle that other parts are compared with, and the "before" of every before and after.
"""

from __future__ import annotations

from typing import Any

from intarsia.hookspecs import hookimpl
from intarsia.protocols import (
    CacheContext,
    ExecutorContext,
    LoaderContext,
    ModelContext,
    PartContext,
    RunnerContext,
)
from intarsia.types import CacheOptions, Fit, Provider, Unfit

# What a part needs is imported when it is asked for: listing plugins stays fast and needs no torch.


@hookimpl
def provide_loaders() -> list[Provider]:
    """Hugging Face folders."""

    def fit(context: LoaderContext) -> Fit | Unfit:
        from intarsia.defaults import safetensors

        return safetensors.fit(context)

    def build(context: LoaderContext) -> Any:
        from intarsia.defaults import safetensors

        return safetensors.build(context)

    summary = "Hugging Face folder: config.json, safetensors (single or sharded, mapped), tokenizer.json"
    return [Provider(key="safetensors", summary=summary, fit=fit, build=build)]


@hookimpl
def provide_models() -> list[Provider]:
    """The llama family."""

    def fit(context: ModelContext) -> Fit | Unfit:
        from intarsia.defaults import llama

        return llama.fit(context)

    def build(context: ModelContext) -> Any:
        from intarsia.defaults import llama

        return llama.build(context)

    summary = "llama: RMS norm, rotary positions, grouped-query attention, SiLU-gated feed-forward"
    return [Provider(key="llama", summary=summary, fit=fit, build=build)]


@hookimpl
def provide_kernels() -> list[Provider]:
    """The torch reference of every op."""

    def build(context: PartContext) -> Any:
        from intarsia.defaults.torch_kernels import TorchKernels

        return TorchKernels(context.engine.device)

    return [Provider(key="torch", summary="every op through torch: the reference", build=build)]


@hookimpl
def provide_attention_backends() -> list[Provider]:
    """The oracle, fixed tiles, and torch's kernel."""

    def fit_sdpa(context: PartContext) -> Fit | Unfit:
        from intarsia.defaults import attention

        return attention.fit_sdpa(context)

    def build_sdpa(context: PartContext) -> Any:
        from intarsia.defaults import attention

        return attention.build_sdpa(context)

    def build_eager(context: PartContext) -> Any:
        from intarsia.defaults import attention

        return attention.build_eager(context)

    def fit_tiled(context: PartContext) -> Fit:
        from intarsia.defaults import attention

        return attention.fit_tiled(context)

    def build_tiled(context: PartContext) -> Any:
        from intarsia.defaults import attention

        return attention.build_tiled(context)

    return [
        Provider(
            key="eager",
            summary="explicit softmax in fp32, row by row: the oracle",
            fit=lambda _: Fit(10, "explicit softmax: the oracle"),
            build=build_eager,
        ),
        Provider(
            key="tiled",
            summary="fixed tiles of keys in fp32, row by row: bitwise whatever the chunks",
            fit=fit_tiled,
            build=build_tiled,
        ),
        Provider(
            key="sdpa",
            summary="torch's scaled_dot_product_attention, row by row",
            fit=fit_sdpa,
            build=build_sdpa,
        ),
    ]


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """The cache that reserves the maximum."""

    def build(context: CacheContext) -> Any:
        from intarsia.defaults import contiguous

        return contiguous.build(context)

    summary = "every sequence reserves max_model_len, side by side"
    return [Provider(key="contiguous", summary=summary, options=CacheOptions, build=build)]


@hookimpl
def provide_runners() -> list[Provider]:
    """The runner that calls the ops."""

    def build(context: RunnerContext) -> Any:
        from intarsia.models.eager import EagerRunner

        return EagerRunner.build(context)

    return [Provider(key="eager", summary="the model op by op: the meaning of every other runner", build=build)]


@hookimpl
def provide_schedulers() -> list[Provider]:
    """Static batching."""
    from intarsia.defaults import static

    summary = "static batching: a batch runs until its last sequence is finished"
    return [
        Provider(key="static", summary=summary, options=static.StaticOptions, requires=("cache",), build=static.build)
    ]


@hookimpl
def provide_executors() -> list[Provider]:
    """This process."""

    def build(context: ExecutorContext) -> Any:
        from intarsia import executor

        return executor.build(context)

    return [Provider(key="local", summary="this process, one device", build=build)]
