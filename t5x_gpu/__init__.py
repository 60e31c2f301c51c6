"""T5X-style training in JAX on NVIDIA GPUs."""

from t5x_gpu.runtime import import_interrupts

import_interrupts.before_imports()
