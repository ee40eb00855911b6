"""Write a GGUF file's weights as a bf16 safetensors folder that other engines load: export_hf.py FILE.gguf FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

source, target = Path(sys.argv[1]), sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
quantized = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
quantized.config.__dict__.pop("quantization_config", None)
model = LlamaForCausalLM(quantized.config)
model.load_state_dict(quantized.state_dict())
model.generation_config.eos_token_id = 2
model.to(torch.bfloat16).save_pretrained(target)
tokenizer.save_pretrained(target)
