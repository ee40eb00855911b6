"""Traffic between ranks that share a model, counted as they run beside the formula; SmolLM2 in three slices.

    python tests/tools/traffic.py

Starts three processes that run 15 tokens of a mixed batch in float32, with gloo.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

TP, MODEL = 3, "smollm2"
#: The batch is the second half of the first prompt and all of the second.
_LENGTHS = (17, 6)
_TOKENS = 15


def main() -> None:
    """Count, and print a table."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from intarsia_parallel.partition import share_out
    from intarsia_parallel.traffic import token_payloads
    from sliced_ranks import SlicedRank, run_ranks

    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in _LENGTHS]
    job = {"sections": {"model": MODEL}, "prompts": prompts, "params": [{"temperature": 0.0}] * 2, "steps": 1}
    jobs = {str(sequence): job | {"executor": {"sequence": sequence}} for sequence in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        _, traffic = run_ranks(Path(folder) / "run", TP, jobs)
    spec = SlicedRank.composed({"model": MODEL}, {}).spec
    print("rank  sequence  op              calls  bytes a token  by formula")
    for sequence in (False, True):
        for share in share_out(spec, TP, 1):
            formula = token_payloads(spec, share, "float32", sequence=sequence)
            for op, counted in traffic[share.rank][str(sequence)].items():
                of_token = f"{counted['bytes'] / _TOKENS:13.0f}  {formula.get(op, '-'):>10}"
                print(f"{share.rank:4}  {sequence!s:8}  {op:14}  {counted['calls']:5}  {of_token}")


if __name__ == "__main__":
    main()
