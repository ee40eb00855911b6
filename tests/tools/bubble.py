"""The bubble of a pipeline, measured on a model whose stages sleep in place of computing: two cores are enough for it.

    python tests/tools/bubble.py MODEL_FOLDER

Prints, for stages p and microbatches m, the share of its steps' time that a stage idles, beside (p - 1) / (m + p - 1).
`MODEL_FOLDER` holds any small model of at least 4 layers; its weights are loaded and not used.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

#: How long a stage sleeps for a microbatch.
STAGE_S = 0.02
_NUM_STEPS = 25

#: A plugin with a runner that sleeps, as a package that every rank can import.
_PLUGIN = """
import time
from attrs import frozen
from intarsia.hookspecs import hookimpl
from intarsia.types import Fit, Provider


@frozen(kw_only=True)
class Options:
    stage_s: float = 0.02


class Runner:
    def __init__(self, context):
        self.seconds, self.spec = context.options.stage_s, context.spec

    def run(self, batch, cache, layers, hidden_TE=None):
        import torch
        time.sleep(self.seconds)
        return torch.zeros(len(batch.ids_T), self.spec.embed_dim)

    def logits(self, hidden_TE, rows_L):
        import torch
        return torch.zeros(len(rows_L), self.spec.vocab_size)


@hookimpl
def provide_runners():
    return [
        Provider(
            key="sleeping", summary="sleeps", options=Options, fit=lambda _: Fit(0), build=Runner,
            parallel=frozenset({"stages"}),
        )
    ]
"""


def install_sleeping_runner(folder: Path) -> None:
    """Write the plugin into a folder that is, or will be, on `sys.path`."""
    (folder / "sleeping_runner.py").write_text(_PLUGIN)
    facts = folder / "sleeping_runner-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeping-runner\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[intarsia]\nsleeping_runner = sleeping_runner\n")


def measure(model: Path, stages: int, microbatches: int, num_steps: int = _NUM_STEPS) -> list[float]:
    """Return the share of the steps' time in which each stage computes nothing.

    As many requests decode at once as there are microbatches. The plugin is installed.
    """
    from intarsia import Engine, Request, SamplingParams

    config = {
        "model": str(model),
        "engine": {"dtype": "float32", "threads": 1, "max_model_len": 128, "plugins": {"block": ["cpu"]}},
        "cache": {"memory": "8MiB"},
        "scheduler": "inflight",
        "runner": {"use": "sleeping", "stage_s": STAGE_S},
        "executor": {"use": "parallel", "pp": stages, "microbatches": microbatches},
    }
    params = SamplingParams(temperature=0, max_tokens=num_steps + 20, ignore_eos=True)
    with Engine.from_config(config) as engine:
        for index in range(microbatches):
            engine.add(Request(request_id=str(index), prompt=[1 + index], params=params))
        for _ in range(5):
            engine.step()
        before = engine.parts.executor.figures()
        begun = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wall = time.perf_counter() - begun
        after = engine.parts.executor.figures()
    return [1 - (b["busy_s"] - a["busy_s"]) / wall for a, b in zip(before, after, strict=True)]


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of time that a stage of a pipeline idles (Huang et al. 2019)."""
    return (stages - 1) / (microbatches + stages - 1)


def main() -> None:
    """Measure, and print a table."""
    model = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        install_sleeping_runner(Path(folder))
        print("stages  microbatches  (p-1)/(m+p-1)  measured, by stage")
        for stages in (2, 4):
            for microbatches in (1, 2, 4, 8):
                idle = measure(model, stages, microbatches)
                shares = " ".join(f"{share:.3f}" for share in idle)
                print(f"{stages:6}  {microbatches:12}  {bubble(stages, microbatches):13.3f}  {shares}")


if __name__ == "__main__":
    main()
