"""Plain parts, registered as a plugin like any other: with no other plugin allowed the core still runs.

The naive engine: static batching over a cache that reserves the maximum, attention and ops through torch. It is the
oracle that other parts are compared with, and the "before" of every before and after.
"""

from __future__ import annotations

from intarsia.families import provider
from intarsia.hookspecs import hookimpl
from intarsia.types import CacheOptions, Provider, lazy


@hookimpl
def provide_loaders() -> list[Provider]:
    """Hugging Face folders."""
    return [
        Provider(
            key="safetensors",
            summary="Hugging Face folder: config.json, safetensors (single or sharded, mapped), tokenizer.json",
            fit=lazy("intarsia.defaults.safetensors:fit"),
            build=lazy("intarsia.defaults.safetensors:build"),
        )
    ]


@hookimpl
def provide_models() -> list[Provider]:
    """The llama family."""
    summary = "llama: RMS norm, rotary positions, grouped-query attention, SiLU-gated feed-forward"
    return [provider("llama", "intarsia.defaults.llama:FAMILY", summary)]


@hookimpl
def provide_kernels() -> list[Provider]:
    """The torch reference of every op, and oneDNN's product."""
    return [
        Provider(
            key="torch",
            summary="every op through torch: the reference",
            build=lazy("intarsia.defaults.torch_kernels:build"),
        ),
        Provider(
            key="onednn",
            summary="bf16 matrix products on CPUs, weights laid out once",
            fit=lazy("intarsia.defaults.onednn:fit"),
            build=lazy("intarsia.defaults.onednn:build"),
        ),
    ]


@hookimpl
def provide_attention_backends() -> list[Provider]:
    """The oracle, fixed tiles, and torch's kernel."""
    return [
        Provider(
            key="eager",
            summary="explicit softmax in fp32, row by row: the oracle",
            build=lazy("intarsia.defaults.attention:build_eager"),
        ),
        Provider(
            key="tiled",
            summary="fixed tiles of keys in fp32, row by row: bitwise whatever the chunks",
            fit=lazy("intarsia.defaults.attention:fit_tiled"),
            build=lazy("intarsia.defaults.attention:build_tiled"),
        ),
        Provider(
            key="sdpa",
            summary="torch's scaled_dot_product_attention; rows that decode run together",
            fit=lazy("intarsia.defaults.sdpa:fit"),
            build=lazy("intarsia.defaults.sdpa:build"),
        ),
    ]


@hookimpl
def provide_cache_allocators() -> list[Provider]:
    """The cache that reserves the maximum."""
    return [
        Provider(
            key="contiguous",
            summary="every sequence reserves max_model_len, side by side",
            options=CacheOptions,
            build=lazy("intarsia.defaults.contiguous:build"),
        )
    ]


@hookimpl
def provide_runners() -> list[Provider]:
    """The runner that calls the ops."""
    return [
        Provider(
            key="eager",
            summary="the model op by op: the meaning of every other runner",
            parallel=frozenset(
                {
                    "all_reduce",
                    "look_up",
                    "gather_tokens",
                    "gather_rows",
                    "own_tokens",
                    "rms_norm_over_ranks",
                    "stages",
                }
            ),
            build=lazy("intarsia.models.eager:build"),
        )
    ]


@hookimpl
def provide_schedulers() -> list[Provider]:
    """Static batching."""
    from intarsia.defaults.static import StaticOptions

    return [
        Provider(
            key="static",
            summary="static batching: a batch runs until its last sequence is finished",
            options=StaticOptions,
            requires=("cache",),
            build=lazy("intarsia.defaults.static:build"),
        )
    ]


@hookimpl
def provide_executors() -> list[Provider]:
    """This process."""
    from intarsia.defaults.local import LocalOptions, fit

    return [
        Provider(
            key="local",
            summary="this process, one device",
            options=LocalOptions,
            fit=fit,
            build=lazy("intarsia.executor:build"),
        )
    ]
