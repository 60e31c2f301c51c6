"""Prepares TensorFlow datasets, and finds unprepared datasets that a task needs.

    python -m t5x_gpu.data.prepare_tfds glue/cola:2.0.0 --data_dir=/data/tfds

The `tfds build` command of TFDS 4.9.10 needs apache-beam to start (tensorflow/datasets#5463). TFDS
also builds only the newest version of a dataset, while T5's tasks name old versions:
`--from_version` prepares the newest version and copies it under the old number.
"""

import argparse
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from typing import Optional, Union

import tensorflow_datasets as tfds

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.sources.seqio_sources import tfds_builder
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError, first_line, listed
from t5x_gpu.storage.user_paths import without_dots

PROG = 'python -m t5x_gpu.data.prepare_tfds'
# Errors of TFDS for an unknown dataset, configuration or version.
TFDS_ERRORS = (tfds.core.registered.DatasetNotFoundError, AssertionError, OSError, ValueError)
_NAME = ('DatasetConfig.mixture_or_task_name',)
_MAX_LISTED = 16


@dataclasses.dataclass(frozen=True)
class Missing:
  """A dataset that is not prepared.

  Attributes:
    dataset: the task's name for the dataset, 'glue/cola:1.0.0'.
    data_dir: the folder of all datasets.
    reason: why the dataset cannot be read: 'FOLDER does not exist'.
    from_version: the version to build instead, if TFDS no longer builds the task's version.
    is_fixed: whether the task sets the folder, so that --tfds_data_dir does not change it.
  """

  dataset: str
  data_dir: str
  reason: str
  from_version: Optional[str] = None
  is_fixed: bool = False


def missing_dataset(task: seqio.Task, config: DatasetConfig) -> Optional[Missing]:
  """Returns the dataset that `task` needs for the split of `config`, unless it is prepared.

  A task that does not list its splits has the splits of the prepared dataset, so it needs the
  dataset even to find out whether the split exists.
  """
  source = task.source
  if not isinstance(source, seqio.TfdsDataSource):
    return None
  loader = source.tfds_dataset
  if loader.tfds_splits is not None and config.split not in loader.tfds_splits:
    return None
  dataset, data_dir = loader.get_split_params(config.split)
  root = os.path.expanduser(str(data_dir or tfds.core.constants.DATA_DIR))
  name = dataset or f'the dataset in {root}'
  is_fixed = loader.tfds_splits is not None and data_dir is not None
  try:
    splits, builder = source.splits, tfds_builder(source, config.split)
    if builder.info.splits or splits and (config.use_cached or config.split not in splits):
      return None
  except TFDS_ERRORS as e:
    return Missing(name, root, first_line(e)[:300], is_fixed=is_fixed)
  folder = str(builder.data_dir)
  return Missing(
    name,
    root,
    f'{folder} ' + ('has no prepared split' if os.path.isdir(folder) else 'does not exist'),
    from_version=_newer_version(builder),
    is_fixed=is_fixed,
  )


def _newer_version(builder: tfds.core.DatasetBuilder) -> Optional[str]:
  """Returns the version that TFDS builds instead of `builder`'s version; None if it builds that."""
  built = {str(version) for version in (builder.canonical_version, max(builder.versions))}
  return None if str(builder.version) in built else str(builder.canonical_version)


def check_prepared(task: Union[seqio.Task, seqio.Mixture], config: DatasetConfig) -> None:
  """Raises DataError, with the commands to run, if `task` reads datasets that are not prepared."""
  missing = {missing_dataset(subtask, config) for subtask in seqio.get_subtasks(task)} - {None}
  found = sorted(missing, key=lambda one: one.dataset)
  if not found:
    return
  name = config.mixture_or_task_name
  lines = listed([f'{one.dataset}: {one.reason}' for one in found], _MAX_LISTED)
  what = (
    f'{name!r} reads the TensorFlow dataset {lines[0]}; it is not prepared.'
    if len(found) == 1
    else f'{name!r} reads {len(found)} TensorFlow datasets that are not '
    'prepared:\n  ' + '\n  '.join(lines)
  )
  raise DataError(what, fix=_fix(found), parameters=_NAME, docs='tasks.md#tensorflow-datasets')


def _fix(found: Sequence[Missing]) -> str:
  groups: dict[tuple[str, Optional[str]], list[str]] = {}
  for one in found:
    groups.setdefault((one.data_dir, one.from_version), []).append(one.dataset)
  lines = ['Prepare it once, on a machine with network (runs download nothing):']
  for (data_dir, from_version), names in groups.items():
    lines.append('  ' + prepare_command(names, data_dir=data_dir, from_version=from_version))
  if versions := sorted({one.from_version for one in found if one.from_version}):
    lines.append(
      f'TFDS {tfds.__version__} no longer builds the version that the task names; this '
      f'uses the data of {", ".join(versions)} instead.'
    )
  fixed = sorted({one.data_dir for one in found if one.is_fixed})
  if fixed:
    lines.append(f'The task names {", ".join(fixed)} itself; --tfds_data_dir does not change that.')
  if len(fixed) < len({one.data_dir for one in found}):
    lines.append(
      'Another folder: give this command --data_dir=DIR, and every run --tfds_data_dir=DIR.'
    )
  return '\n'.join(lines)


def prepare_command(
  datasets: Sequence[str], *, data_dir: str = 'DIR', from_version: Optional[str] = None
) -> str:
  """Returns the command that prepares `datasets`; versions with wildcards are left out."""
  names = [name.partition(':')[0] if '*' in name else name for name in datasets]
  return f'{PROG} {" ".join(names)} --data_dir={data_dir}' + (
    f' --from_version={from_version}' if from_version else ''
  )


def prepare(dataset: str, *, data_dir: str, from_version: Optional[str] = None) -> str:
  """Downloads and prepares `dataset` unless it is already prepared; returns its folder.

  Args:
    dataset: 'glue/cola:1.0.0', or without a version.
    data_dir: the folder of all datasets.
    from_version: prepare this version, then copy it under the version of `dataset`.
  Raises:
    DataError: TFDS does not have the dataset, or cannot build it.
  """
  name, _, version = dataset.partition(':')
  try:
    builder = tfds.builder(dataset, data_dir=data_dir)
    if builder.info.splits:
      return str(builder.data_dir)
    if from_version is None and (newer := _newer_version(builder)):
      raise DataError(
        f'TFDS {tfds.__version__} no longer builds version {builder.version} of {name}.',
        fix=f'To use the data of {newer} instead, add --from_version={newer}.',
        docs='tasks.md#tensorflow-datasets',
      )
    if from_version is None:
      builder.download_and_prepare()
      return str(builder.data_dir)
    newer_folder = prepare(f'{name}:{from_version}', data_dir=data_dir)
    same = version in ('', from_version)
    return newer_folder if same else _copy_as(newer_folder, version=version)
  except (*TFDS_ERRORS, ImportError, RuntimeError) as e:
    raise DataError(
      f'TFDS cannot prepare {dataset} in {data_dir}: {first_line(e)[:500]}',
      fix='Check the name and version (https://www.tensorflow.org/datasets/catalog), '
      'the network, and the space in that folder.',
      docs='tasks.md#tensorflow-datasets',
    ) from e


def _copy_as(folder: str, *, version: str) -> str:
  """Copies a prepared dataset under another version; returns the folder of the copy."""
  target = os.path.join(os.path.dirname(folder), version)
  partial = f'{target}.incomplete'
  shutil.rmtree(partial, ignore_errors=True)
  shutil.copytree(folder, partial)
  path = os.path.join(partial, 'dataset_info.json')
  with open(path, encoding='utf-8') as f:
    info = json.load(f)
  info['version'] = version
  with open(path, 'w', encoding='utf-8') as f:
    json.dump(info, f, indent=2)
  os.rename(partial, target)
  return target


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Prepares the datasets on the command line, one after the other."""
  parser = argparse.ArgumentParser(prog=PROG, description='Prepares TensorFlow datasets.')
  parser.add_argument('datasets', nargs='+', metavar='NAME[:VERSION]')
  parser.add_argument(
    '--data_dir',
    required=True,
    metavar='DIR',
    help='folder for the datasets; runs find it with --tfds_data_dir=DIR',
  )
  parser.add_argument(
    '--from_version',
    metavar='VERSION',
    help='use the data of this version, if TFDS no longer builds the version that a task names',
  )
  args = parser.parse_args(argv)
  data_dir = without_dots(os.path.expanduser(args.data_dir))
  for dataset in args.datasets:
    folder = prepare(dataset, data_dir=data_dir, from_version=args.from_version)
    print(f'{dataset}: {folder}', flush=True)
  return 0


if __name__ == '__main__':
  from t5x_gpu import cli

  cli.run_main(main)
