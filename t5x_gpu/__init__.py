"""T5X-style training in JAX on NVIDIA GPUs."""

from t5x_gpu.runtime import interrupts

interrupts.leave_during_imports()
