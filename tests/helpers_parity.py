"""Two programs take the same steps, by the comparison of `python -m t5x_gpu.parity`."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.parity.paired_run import RecordedRun, Recording, TwoRuns
from t5x_gpu.tools.parity.verdict import compare_runs
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK
from tests.helpers_programs import build_with
from tests.parity.tolerances import MESH_GRADIENT

# Of programs that are compared: `Recording` stores the gradients.
OPTIMIZER = Recording(AdamW())


def recorded(program: Program, options: Mapping[str, Any] = QUICK) -> RecordedRun:
  """Returns the compiled steps of a program whose optimizer is a `Recording`.

  Args:
    program: a layout.
    options: of XLA.
  """
  return RecordedRun(program, compiler_options=options, layers=False)


def assert_same_steps(got: RecordedRun, want: RecordedRun, *, num_steps: int = 1) -> None:
  """Initial values, losses, gradients and updates agree; of gradients, up to proven rounding."""
  batches = uneven_batches(want.program.spec, seed=1, num_batches=num_steps)
  report = compare_runs(TwoRuns(got, want), batches, tolerance=MESH_GRADIENT)
  assert report.failure is None, f'{report.sentence()}. {report.failure.how}'


def assert_same_evaluation(
  got: Program, want: Program, *, but: Collection[str] = ()
) -> Mapping[str, Any]:
  """Evaluations of the initial parameters agree; returns the sums of `want`, `but` in it alone."""
  [batch] = uneven_batches(want.spec, seed=1, num_batches=1)
  ours, theirs = (
    jax.device_get(p.eval_step(p.init().params, p.layout.put_batch(batch))) for p in (got, want)
  )
  assert ours.keys() == theirs.keys() - set(but)
  for name in ours:
    for a, b in zip(ours[name], theirs[name], strict=True):
      np.testing.assert_allclose(a, b, rtol=MESH_GRADIENT, atol=1e-6, err_msg=name)
  return theirs


def program_on_mesh(model: Model, num_microbatches: int = 1, **partitioner: Any) -> Program:
  """Returns a program on eight devices that records its gradients."""
  lengths = {'targets': 16}
  if isinstance(model, EncoderDecoderModel):
    lengths['inputs'] = 16
  return build_with(
    model=model,
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, 8),
    devices=jax.devices()[:8],
    task_feature_lengths=lengths,
    num_microbatches=num_microbatches,
    batch_size=16,
    pack=True,
  )
