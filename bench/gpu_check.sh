#!/bin/sh
# Proves and measures the CUDA side on the GPU at hand, in under 6 minutes; see gpu_check.py.
# Needs python3 with torch >= 2.11 and triton; nothing is installed. Exit code: 0 all exact and
# correct, 1 something is not, 2 no GPU.
#   bench/gpu_check.sh             results in bench/results/gpu_check.json
#   OUT=place bench/gpu_check.sh   results in that file or folder
cd "$(dirname "$0")/.." || exit 2
"${PYTHON:-python3}" -c 'import torch, triton' || {
    echo "gpu_check needs torch and triton in ${PYTHON:-python3}; name another with PYTHON=." >&2
    exit 2
}
PYTHONPATH=. exec "${PYTHON:-python3}" -u bench/gpu_check.py "$@"
