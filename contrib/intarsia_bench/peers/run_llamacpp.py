"""llama.cpp through llama-cpp-python's C API: continuous batching over 16 sequences, as its server does it."""

from __future__ import annotations

import os
import sys
from typing import Any

import workloads

protocol = workloads.own_stdout()

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402

SEQUENCES, BATCH = 16, 2048
llama_cpp.llama_backend_init()
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), llama_cpp.llama_model_default_params())
params = llama_cpp.llama_context_default_params()
params.n_ctx, params.n_batch, params.n_ubatch = 1280 * SEQUENCES, BATCH, 512
params.n_threads = params.n_threads_batch = int(os.environ["OMP_NUM_THREADS"])
params.n_seq_max, params.no_perf = SEQUENCES, True
params.kv_unified = os.environ.get("LLAMA_KV_UNIFIED", "1") == "1"
context = llama_cpp.llama_init_from_model(model, params)
memory = llama_cpp.llama_get_memory(context)
vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))


def argmax(row: int) -> int:
    return int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), shape=(vocab,)).argmax())


def push(batch: Any, token: int, position: int, sequence: int, *, wants_logits: bool) -> int:
    """Put a token at the end of the batch; return its row."""
    row: int = batch.n_tokens
    batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
    batch.seq_id[row][0], batch.logits[row] = sequence, wants_logits
    batch.n_tokens += 1
    return row


def generate(requests: workloads.Work) -> None:
    llama_cpp.llama_memory_clear(memory, True)
    waiting = list(requests)
    free = list(range(SEQUENCES))
    running: dict[int, dict[str, int]] = {}
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    while waiting or running:
        batch.n_tokens, sampled = 0, []
        for s, state in running.items():
            sampled.append((s, push(batch, state["last"], state["position"], s, wants_logits=True)))
        while waiting and free and batch.n_tokens + len(waiting[0][0]) <= BATCH:
            (ids, n), s = waiting.pop(0), free.pop()
            for p, token in enumerate(ids):
                row = push(batch, token, p, s, wants_logits=p == len(ids) - 1)
            running[s] = {"position": len(ids) - 1, "left": n}
            sampled.append((s, row))
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        for s, row in sampled:
            state = running[s]
            state["last"], state["position"], state["left"] = argmax(row), state["position"] + 1, state["left"] - 1
            if not state["left"]:
                llama_cpp.llama_memory_seq_rm(memory, s, -1, -1)
                free.append(s)
                del running[s]
    llama_cpp.llama_batch_free(batch)


workloads.serve(protocol, generate)
