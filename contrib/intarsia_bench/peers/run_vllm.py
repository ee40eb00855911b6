"""vLLM's CPU build, bf16."""

from __future__ import annotations

import os
import sys

import workloads

if __name__ == "__main__":
    protocol = workloads.own_stdout()
    threads = int(os.environ["OMP_NUM_THREADS"])
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="4",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        HF_HUB_OFFLINE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=4096, max_num_seqs=64)

    def generate(requests: workloads.Work) -> None:
        llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in requests],
            [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in requests],
            use_tqdm=False,
        )

    workloads.serve(protocol, generate)
