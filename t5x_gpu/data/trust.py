"""Refuses datasets that would run code that the user did not name. No TF."""

import re
from collections.abc import Collection
from typing import Optional

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.errors import ConfigError

_OUR_MODULES = 't5x_gpu.data.'


def check_trusted(config: DatasetConfig, may_import: Optional[Collection[str]]) -> None:
  """Raises ConfigError if opening `config` would run code from outside t5x_gpu.

  Args:
    config: read from the gin file of a checkpoint folder.
    may_import: modules that may be imported in addition to t5x_gpu's; None for any.
  """
  if may_import is None:
    return
  modules = {name: getattr(config, name) for name in ('module', 'mixture_or_task_module')}
  foreign = [
    name
    for name, module in modules.items()
    if module and module not in may_import and not str(module).startswith(_OUR_MODULES)
  ]
  # TFDS downloads code for a community dataset, tfds:NAMESPACE:NAME.
  _, is_tfds, dataset = config.mixture_or_task_name.partition('tfds:')
  if is_tfds and not re.fullmatch(r'[\w/.-]+(:[\d*]+\.[\d*]+\.[\d*]+)?(#[^#]*)?', dataset):
    foreign.append('mixture_or_task_name')
  if foreign:
    raise ConfigError(
      'The task of this checkpoint would run code from outside t5x_gpu: '
      + ', '.join(f'DatasetConfig.{name} = {getattr(config, name)!r}' for name in foreign)
      + '.',
      fix='The gin file of a checkpoint folder is read as data, because the folder may come from '
      'elsewhere.\nIf you trust it, add --trust_gin. Or leave the task out: give '
      '--vocabulary=NAME and --prompts=FILE.\nOr name your own gin file: --gin_file=FILE.',
      parameters=[f'DatasetConfig.{name}' for name in foreign],
      docs='infer.md#trust',
    )
