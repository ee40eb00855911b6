"""Flash attention over the paged cache, in Triton on GPUs and in tiles of torch ops elsewhere."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy


@hookimpl
def provide_attention_backends() -> list[Provider]:
    """Flash attention."""
    return [
        Provider(
            key="flash",
            summary="flash attention over pages in Triton, long rows in splits of fixed keys; on CPUs in torch ops",
            fit=lazy("intarsia_flash.attention:fit"),
            build=lazy("intarsia_flash.attention:build"),
        )
    ]
