"""With no plugin allowed, the core alone loads a model and generates what transformers does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from models import tiny_llama

ROOT = Path(__file__).parents[2]
PROMPTS = [[72, 101, 108, 108, 111], [1], list(range(40, 77))]
STEPS = 24

SCRIPT = """
import json, sys
from intarsia import Engine, SamplingParams

config = {"model": sys.argv[1], "engine": {"dtype": "float32"}, "cache": {"memory": "64MiB"}, "plugins": {"allow": []}}
with Engine.from_config(config) as engine:
    params = SamplingParams(max_tokens=int(sys.argv[3]), temperature=0, ignore_eos=True)
    completions = engine.generate(json.loads(sys.argv[2]), params)
    text = engine.generate("Hello", params)[0]
    report = engine.explain()
print(json.dumps({
    "token_ids": [completion.token_ids for completion in completions],
    "text": [text.prompt_token_ids, text.token_ids, text.text],
    "providers": sorted({part["provider"].split()[0] for part in report["parts"].values()}),
    "modules": sorted(sys.modules),
}))
"""


@torch.no_grad()
def greedy(model, prompt):
    ids = model.generate(
        torch.tensor([prompt]), max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, eos_token_id=None
    )
    return ids[0, len(prompt) :].tolist()


def test_the_bare_core_generates_what_transformers_does_and_imports_no_plugin(tmp_path):
    path, model = tiny_llama(tmp_path)
    arguments = [sys.executable, "-c", SCRIPT, str(path), json.dumps(PROMPTS), str(STEPS)]
    run = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["token_ids"] == [greedy(model, prompt) for prompt in PROMPTS]
    prompt_ids, token_ids, text = answer["text"]
    assert token_ids == greedy(model, prompt_ids) and text
    assert answer["providers"] == ["defaults"]
    assert "intarsia.defaults.llama" in answer["modules"]
    plugins = [name for name in answer["modules"] if name.startswith("intarsia_")]
    assert plugins == []
