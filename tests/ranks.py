"""Engines over several ranks, for tests: tiny models, gloo, one thread a rank."""

import contextlib
import os
import time
from pathlib import Path

import pytest

from engines import engine_of
from intarsia import SamplingParams

#: Room for about half of the mixed requests at once, so that some are preempted.
NUM_PAGES, PAGE_SIZE = 20, 8
#: Layers of the largest stage, of `tiny_llama` with 5.
_MOST_LAYERS = {1: 5, 2: 3, 3: 2, 4: 2}
#: Prompts come in several chunks.
SCHEDULER = {"use": "inflight", "max_tokens": 24, "max_batch": 6}
#: Not compiled anew for every run: kernels of plugins have tests of their own.
ENGINE = {"max_model_len": 128, "plugins": {"block": ["cpu"]}}

#: Prompts with common beginnings, short ones, and one that takes several steps.
PROMPTS = (
    list(range(40)),
    [1, 1, 1],
    [*range(32), 7, 9, 11],
    [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6],
    [200],
    [3, 250, 17, 40] * 8,
    list(range(40)),
)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=20, logprobs=2),
    SamplingParams(temperature=0.8, seed=11, max_tokens=24),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=16, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_p=0.8, seed=5, n=2, max_tokens=12),
    SamplingParams(temperature=0, stop_token_ids=(7, 8, 9), max_tokens=30, logit_bias={3: 1.0}),
    SamplingParams(temperature=0, max_tokens=1),
    SamplingParams(temperature=0, max_tokens=20),
)


def parallel(model, *, tp=1, pp=1, **options):
    """Make an engine of a model over tp x pp ranks; `sections` are the config's, the rest options of the executor."""
    sections = options.pop("sections", {})
    executor = {"use": "parallel", "tp": tp, "pp": pp, "timeout_s": 10.0, **options}
    return engine_of(model, executor=executor, **(mixed(tp, pp) | sections))


def mixed(tp=1, pp=1):
    """Sections of an engine whose prompts come in chunks and whose sequences are preempted."""
    token_bytes = 2 * (2 // tp) * 16 * 4 * _MOST_LAYERS[pp]
    cache = {"use": "paged", "page_size": PAGE_SIZE, "memory": str(NUM_PAGES * PAGE_SIZE * token_bytes)}
    return {"engine": ENGINE, "cache": cache, "scheduler": SCHEDULER}


def said(choice):
    """Return ids, how it ended, and log-probabilities."""
    assert choice.error is None, choice.error
    logprobs = [each.logprob for each in choice.logprobs or ()]
    return choice.token_ids, choice.finish_reason, logprobs


def answers(engine, prompts=PROMPTS, params=PARAMS):
    """Answer a mixed batch; return what was said, a request and choice."""
    return [[said(choice) for choice in each.choices] for each in engine.generate(list(prompts), list(params))]


def near(answered):
    """Return answers that others must equal: ids exactly, log-probabilities up to 1e-4."""
    return [[(ids, reason, pytest.approx(logprobs, abs=1e-4)) for ids, reason, logprobs in each] for each in answered]


def children():
    """Return the process ids of this process's children that are alive, zombies among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.append(int(entry.name))
    return found


def is_gone(pid):
    """Whether no process has this id any more, or only its entry is left for its parent to read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(is_so, timeout_s):
    """Wait until something is so; return the seconds that it took."""
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < timeout_s, f"not so after {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun


def pids(engine):
    """Return the process ids of an engine's ranks but the first, by rank."""
    return {rank: peer.pid for rank, peer in engine.parts.executor._watch.peers.items()}
