"""OpenVINO GenAI's continuous batching pipeline over an exported folder, int8 or fp16."""

from __future__ import annotations

import os
import sys
from typing import Any

import workloads

protocol = workloads.own_stdout()

import numpy as np  # noqa: E402
import openvino as ov  # noqa: E402
import openvino_genai as genai  # noqa: E402

scheduler = genai.SchedulerConfig()
scheduler.cache_size = 4
scheduler.max_num_batched_tokens = 2048
scheduler.max_num_seqs = 64
scheduler.enable_prefix_caching = True
threads = int(os.environ["OMP_NUM_THREADS"])
pipe = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})


def config(n: int) -> Any:
    c = genai.GenerationConfig()
    c.max_new_tokens = n
    c.min_new_tokens = n
    c.ignore_eos = True
    c.do_sample = False
    return c


def generate(requests: workloads.Work) -> None:
    prompts = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids, _ in requests]
    pipe.generate(prompts, [config(n) for _, n in requests])


workloads.serve(protocol, generate)
