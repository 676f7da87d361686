#!/usr/bin/env bash
# Everything about the engine that only a GPU can show, in under 8 minutes: a table last, JSON in $OUT or here.
# Needs torch, transformers and the repository, nothing else. --dry-run proves the plumbing on a CPU.
set -eu
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD:$PWD/engine${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-32}"
exec "${PYTHON:-python3}" -m tools.gpu.check "$@"
