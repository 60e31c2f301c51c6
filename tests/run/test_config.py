"""`Run` and the parameters of `train` are the same."""

import inspect

from t5x_gpu import train
from t5x_gpu.run.config import Run


def test_run_has_the_parameters_of_train_with_their_types_and_defaults():
  of_gin, of_run = (inspect.signature(f).parameters for f in (train.train, Run))
  assert {p.name: (p.annotation, p.default) for p in of_gin.values()} == {
    p.name: (p.annotation, p.default) for p in of_run.values()
  }
