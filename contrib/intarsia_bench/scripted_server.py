"""A server whose model says the same token for ever and computes nothing: what is left is serving.

`python -m intarsia_bench.scripted_server ADDRESS --streams 512 --step-s 0.005`
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import define

from intarsia import Engine
from intarsia.protocols import EngineHandle, Parts
from intarsia.testing import scripted
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Choice, Output, Prompt, Request
from intarsia_zmq.frontend import ZmqFrontend, places_of
from intarsia_zmq.options import ZmqOptions

#: Tokens of the longest answer, its prompt included.
CONTEXT = 8192
#: A letter for each id of the vocabulary.
_LETTERS = [chr(code) for code in range(ord("0"), ord("0") + 64)]


@define(eq=False)
class Paced:
    """An engine whose steps take so long at least, as those of a model do that computes on another device.

    Attributes:
        engine: what it is in all else.
        step_s: seconds.
    """

    engine: Engine
    step_s: float

    @property
    def has_work(self) -> bool:
        """As the engine."""
        return self.engine.has_work

    @property
    def parts(self) -> Parts:
        """As the engine."""
        return self.engine.parts

    def step(self) -> Sequence[Output]:
        """Step, and wait for what is left of the time."""
        until = time.perf_counter() + self.step_s
        outputs = self.engine.step()
        time.sleep(max(0.0, until - time.perf_counter()))
        return outputs

    def add(self, request: Request) -> str:
        """As the engine."""
        return self.engine.add(request)

    def cancel(self, request_id: str) -> None:
        """As the engine."""
        self.engine.cancel(request_id)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """As the engine."""
        return self.engine.tokenize(prompt)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """As the engine."""
        return self.engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def stats(self) -> dict[str, object]:
        """As the engine."""
        return self.engine.stats()

    def explain(self) -> dict[str, object]:
        """As the engine."""
        return self.engine.explain()

    def swap(self, slot: str, choice: Choice) -> dict[str, object]:
        """As the engine."""
        return self.engine.swap(slot, choice)

    def close(self) -> None:
        """As the engine."""
        self.engine.close()


def save_model(folder: Path) -> Path:
    """Save a model of 64 letters, whose weights nobody reads; return the folder."""
    from tokenizers import Tokenizer, decoders, models

    save_tiny_model(folder, num_ids=len(_LETTERS), layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(_LETTERS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def start_engine(folder: Path, streams: int, step_s: float) -> EngineHandle:
    """Make an engine that runs so many sequences at once."""
    config = {
        "model": str(folder),
        "engine": {"dtype": "float32", "threads": 1},
        "cache": {"memory": "256MiB"},
        "scheduler": {"use": "inflight", "max_batch": streams},
        "runner": {"use": "scripted", "then": 17},
    }
    engine = Engine.from_config(config, plugins=[scripted])
    return Paced(engine, step_s) if step_s else engine


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0)
    asked = parser.parse_args()
    options = ZmqOptions(bind=asked.address, control="", log_level="warning")
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name) / "scripted")
        ZmqFrontend(
            options, "scripted", places_of(options), lambda: start_engine(folder, asked.streams, asked.step_s)
        ).serve()


if __name__ == "__main__":
    main()
