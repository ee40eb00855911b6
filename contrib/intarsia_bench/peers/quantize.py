"""Write a GGUF file in llama.cpp's other formats: quantize.py FILE.gguf FOLDER."""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

for name, ftype in (("Q8_0", 7), ("BF16", 32), ("Q4_0", 2)):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, 2
    if llama_cpp.llama_model_quantize(
        sys.argv[1].encode(), f"{sys.argv[2]}/{name}.gguf".encode(), ctypes.byref(params)
    ):
        raise SystemExit(f"{name}: llama_model_quantize failed")
