"""Every family under the contract of families, with transformers as the reference."""

import json

import torch
from transformers import AutoModelForCausalLM

from families import CASES
from intarsia.defaults import provide_models as provide_llama
from intarsia.testing.model_families import FamilyContract
from intarsia_families import provide_models
from intarsia_families.contract import Gemma3Contract, Gpt2Contract, MixtralContract, Qwen3MoeContract

PROVIDERS = {provider.key: provider for provide in (provide_models, provide_llama) for provider in provide()}
#: One model a family: the last of `tests/families.py`, which has the most of what it can have.
CONFIGS = {type(case.config).model_type: case.config for case in CASES}
CLASSES = {"gemma3": "Gemma3ForConditionalGeneration", "gpt2": "GPT2LMHeadModel"}
TOLD = {
    "gemma3": Gemma3Contract,
    "gpt2": Gpt2Contract,
    "mixtral": MixtralContract,
    "qwen3_moe": Qwen3MoeContract,
}


def contract(model_type):
    """Return the contract of one family."""

    class Family(TOLD.get(model_type, FamilyContract)):
        def provider(self):
            return PROVIDERS[model_type]

        def config(self):
            config = json.loads(CONFIGS[model_type].to_json_string(use_diff=False))
            return config | {"architectures": [CLASSES.get(model_type, "TinyForCausalLM")], "model_type": model_type}

        @torch.no_grad()
        def reference(self, folder, token_ids):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            return model.eval()(torch.tensor([token_ids])).logits[0].float()

    return Family


for _model_type in PROVIDERS:
    globals()[f"Test{_model_type.title().replace('_', '')}"] = contract(_model_type)
