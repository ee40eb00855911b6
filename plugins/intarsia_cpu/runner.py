"""The runner `cpu_fused`: a layer range in one native call."""

from __future__ import annotations

from intarsia.protocols import Runner, RunnerContext
from intarsia.types import Fit, Unfit


def fit(context: RunnerContext) -> Fit | Unfit:
    """Refuse until the native step is there."""
    del context
    return Unfit("its native step is not built yet")


def build(context: RunnerContext) -> Runner:
    """Never called: it does not fit."""
    raise NotImplementedError
