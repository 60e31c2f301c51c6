#!/usr/bin/env bash
# Times the 134M decoder in bfloat16 on the GPUs of this machine, without TensorFlow or data.
# Needs jax with CUDA, flax, optax, orbax-checkpoint and gin-config; run it from the repository root.
#   scripts/bench_gpu.sh [FOLDER FOR RESULTS]        (benchmarks/results by default)
set -euo pipefail
out=${1:-benchmarks/results}
python=${PYTHON:-python3}
mkdir -p "$out"
export JAX_PLATFORMS=cuda   # a GPU or an error: never a quiet fall back to the CPU
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
for batch in 8 32 64; do
  "$python" -m t5x_gpu.bench --gin_file=gin_configs/examples/tiny_gpu_single.gin \
    --gin.BATCH_SIZE="$batch" --steps 30 --warmup 5 --json "$out/gpu_decoder_base_batch$batch.json"
done
