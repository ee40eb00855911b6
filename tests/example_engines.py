"""Run by the Python of an environment that the examples' wheels are installed in: engines of SmolLM2 with them.

Prints a JSON object: `home` (where intarsia and the plugins were imported from) and, by engine, `answers` (token ids),
`nll` (mean negative log-likelihood of a text's tokens) and `drafts` (guesses that were verified).
"""

import importlib
import json
from pathlib import Path

from intarsia import Engine, SamplingParams

SHARED = "Write the numbers from one to twelve, one in each line, and nothing else.\n"
PROMPTS = [SHARED, SHARED + "one\ntwo\nthree\n", "The capital of France is", "def add(a, b):\n    return a +"]
TEXT = (
    "The sun rose over the quiet village, and people began their day. Children walked to school along the river, "
    "while farmers went to the fields. In the market, a baker sold fresh bread, and an old man told stories about the "
    "time when the railway came. Nobody had seen such a machine before, and for years they spoke of little else."
)
PARTS = {"scheduler": {"use": "srpt", "max_batch": 2}, "cache": {"use": "ttl_prefix"}, "drafter": "markov"}
NF4 = {"quantizer": {"use": "nf4", "double_quant": True, "head": False}}
ENGINES = {"plain": {}, "parts": PARTS, "nf4": NF4, "all": {**PARTS, **NF4}}


def main() -> None:
    """Answer and score with each engine."""
    names = ("intarsia", "intarsia_srpt", "intarsia_ttl_prefix", "intarsia_nf4", "intarsia_markov")
    found = {"home": [importlib.import_module(name).__file__ for name in names], "answers": {}, "nll": {}, "drafts": {}}
    for name, sections in ENGINES.items():
        cache = {"memory": "64MiB", **sections.get("cache", {})}
        engine_options = {"dtype": "float32", "max_model_len": 256, "invariance": "bitwise"}
        config = {"model": "smollm2", "engine": engine_options, **sections, "cache": cache}
        with Engine.from_config(config) as engine:
            (scored,) = engine.generate(TEXT, SamplingParams(max_tokens=0, prompt_logprobs=0))
            logprobs = [each.logprob for each in scored.prompt_logprobs if each is not None]
            found["nll"][name] = -sum(logprobs) / len(logprobs)
            # Without a kernel of its own, a step with NF4 takes seconds.
            params = SamplingParams(max_tokens=4 if "quantizer" in sections else 16, temperature=0)
            # Twice: prefixes are cached then, and the drafter has learned.
            answers = [[list(each.token_ids) for each in engine.generate(PROMPTS, params)] for _ in range(2)]
            assert answers[0] == answers[1]
            found["answers"][name] = answers[0]
            found["drafts"][name] = engine.stats().get("speculation", {}).get("drafted", 0)
    print(json.dumps(found))


if __name__ == "__main__":
    assert Path(__file__).exists()
    main()
