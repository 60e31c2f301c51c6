"""Fully sharded data parallelism (ZeRO-3): parameters, gradients and optimizer state are split too.

What is split: `batch` of activations and `embed` of parameters over `fsdp`; optimizer state follows
its parameter. What moves: each layer's parameters are gathered before use (forward and backward),
its gradients reduce-scattered after. When: parameters and optimizer state do not fit on one GPU.
Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (PyTorch FSDP).
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns what FSDP adds to the table."""
  return AxisRules(parameters={'embed': ('fsdp',)}, activations={'batch': ('fsdp',)})
