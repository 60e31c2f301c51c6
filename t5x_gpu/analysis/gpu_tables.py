"""Memory, kernels and collectives of a step compiled for GPUs, as text and JSON."""

from typing import Any

from t5x_gpu.analysis.gpu_compile import CompiledStep
from t5x_gpu.analysis.kernels import KINDS, KernelCount
from t5x_gpu.analysis.sharding_tables import mib
from t5x_gpu.terminal.text_table import table


def gpu_text(step: CompiledStep) -> str:
  """Returns memory, matrix kernels, and bytes with their overlap, for one GPU and step."""
  target = step.gpus.target
  return '\n'.join(
    [
      f'Compiled for {step.gpus.topology.num_devices} x {target.device_kind} '
      f'({step.gpus.topology}), {step.compile_seconds:.0f} s',
      _memory(step),
      'matrix kernels: '
      + '; '.join(_count(kind, n) for kind, n in step.kernels.items() if n.calls),
      _sent(step),
    ]
  )


def _memory(step: CompiledStep) -> str:
  memory, available = step.memory, step.gpus.target.memory_bytes

  def gib(num_bytes: int) -> str:
    return f'{num_bytes / 2**30:.2f}'

  return (
    f'memory per GPU: {gib(memory.total_bytes)} of {gib(available)} GiB '
    f'({"fits" if memory.total_bytes <= available else "DOES NOT FIT"}), NCCL not counted: '
    f'arguments {gib(memory.argument_bytes)}, temporaries {gib(memory.temporary_bytes)}, '
    f'outputs {gib(memory.output_bytes)}'
  )


def _count(kind: str, number: KernelCount) -> str:
  calls = f'{number.calls} call{"" if number.calls == 1 else "s"}'
  return f'{kind} {number.runs:,} per step ({calls} in the program)'


def _sent(step: CompiledStep) -> str:
  rows = [('kind', 'mesh axis', 'MiB/GPU and step', 'behind a matrix kernel')]
  rows += [(o.kind, '+'.join(o.axes), mib(o.num_bytes), f'{o.share:.0%}') for o in step.overlaps]
  return table(rows, right=(2, 3)) if step.overlaps else 'no collectives: the GPUs exchange nothing'


def gpu_json(step: CompiledStep) -> dict[str, Any]:
  """Returns the contents of `gpu_text` for JSON; kernels as in `kernels.KINDS`."""
  memory = step.memory
  return {
    'gpu': step.gpus.target.name,
    'num_hosts': step.gpus.topology.num_hosts,
    'gpus_per_host': step.gpus.topology.devices_per_host,
    'argument_bytes': memory.argument_bytes,
    'temporary_bytes': memory.temporary_bytes,
    'output_bytes': memory.output_bytes,
    'kernels': {
      kind: {'calls': step.kernels[kind].calls, 'runs': step.kernels[kind].runs} for kind in KINDS
    },
    'sent': {
      f'{o.kind} {"+".join(o.axes)}': {'bytes': o.num_bytes, 'hidden_bytes': o.hidden_bytes}
      for o in step.overlaps
    },
  }
