#!/usr/bin/env bash
# Is this GPU's training right, and how fast is it? One GPU, no network, no data.
#
#   scripts/gpu_check.sh --quick          under 5 minutes: correctness, a loss curve, the 124M's speed
#   scripts/gpu_check.sh --full           also the 354M, flash-attn if installed, the parts of a step
#   scripts/gpu_check.sh --quick --tiny   the same code with toy sizes, also on a CPU
#
# Writes gpu_check/report.json and gpu_check/report.md; exit code 1 if a check failed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m scripts.gpu_check "$@"
