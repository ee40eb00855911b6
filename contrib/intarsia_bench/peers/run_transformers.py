"""transformers' generate(): static batches of up to 16, sorted by length, left padded; as one batches by hand."""

from __future__ import annotations

import os
import sys

import workloads

protocol = workloads.own_stdout()

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

BATCH = 16
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, attn_implementation="sdpa").eval()


@torch.inference_mode()
def generate(requests: workloads.Work) -> None:
    requests = sorted(requests, key=lambda request: request[1])
    for first in range(0, len(requests), BATCH):
        batch = requests[first : first + BATCH]
        width = max(len(ids) for ids, _ in batch)
        ids_RT = torch.tensor([[2] * (width - len(ids)) + ids for ids, _ in batch])
        mask_RT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in batch])
        n = max(n for _, n in batch)
        model.generate(
            ids_RT, attention_mask=mask_RT, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=2
        )


workloads.serve(protocol, generate)
