"""Local checkpoints of several simulated hosts: saved, partly lost, promoted, bit-exact.

Each device is driven by a process of its own or shares one, two devices make a host, and every host
has its folder. Promotion runs in this process, which finds what the surviving hosts have.
"""

import collections
import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t5x_gpu.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from t5x_gpu.checkpoint.local import promotion
from t5x_gpu.checkpoint.local.file_format import open_local_file
from t5x_gpu.checkpoint.local.promotion import promote_local
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.checkpoint.local.tier import ABOUT, LocalTier, open_local_tier, read_run_id
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.model_dir import ModelDir, newest_complete
from t5x_gpu.checkpoint.store import StateReader, empty_leaves
from t5x_gpu.errors import AccessError, CheckpointError
from t5x_gpu.tools.checkpoints import verify
from t5x_gpu.training.adafactor import FactoredMoment
from t5x_gpu.training.state import TrainState
from tests.checkpoint.test_checksums import flip_a_bit
from tests.checkpoint.test_run_lock import lock_of
from tests.helpers_disk import refused_to_python
from tests.helpers_layouts import Case, build, program
from tests.helpers_train import listing
from tests.messages import raises

LAYOUTS = ('dp', 'fsdp', 'tp', 'pp', 'hsdp', '3d')
NAMES = ('gpu-001', 'gpu-002', 'gpu-003', 'gpu-004')
# Two devices of a host in one process, and a process of its own for each.
TOGETHER = Hosts(NAMES, NAMES, lambda device: device.id // 2)
APART = Hosts(*(tuple(NAMES[i // 2] for i in range(8)),) * 2, lambda device: device.id)


def filled(abstract, *, step: int):
  """Returns a state of random bits; NaNs and all, where they are not whole numbers."""
  random = np.random.default_rng(step)

  def array(like):
    bits = np.frombuffer(random.bytes(math.prod(like.shape) * like.dtype.itemsize), like.dtype)
    bits = bits.reshape(like.shape)
    return jax.make_array_from_callback(like.shape, like.sharding, bits.__getitem__)

  state = jax.tree.map(array, abstract)
  return state.replace(step=jax.device_put(np.int32(step), abstract.step.sharding))


def facts_of(state, step: int, **changes):
  return {
    'data_state': b'data of %d' % step,
    'manifest': make_manifest(
      state, mesh_shape={}, data={'task': 'none'}, next_batch_hash=f'hash{step}', **changes
    ),
  }


def tiers_of(tmp_path, layout: str, hosts: Hosts, *, attempt: str = 'first') -> list[LocalTier]:
  """Returns the tier of each process, in the folder of its host."""
  model_dir = tmp_path / 'model'
  model_dir.mkdir(exist_ok=True)
  copies = plan_copies(program(layout).abstract_state, hosts)
  return [
    LocalTier(
      tmp_path / hosts.names[i],
      model_dir=model_dir,
      copies=copies,
      hosts=hosts,
      period=1,
      process=i,
      attempt=attempt,
    )
    for i in range(len(hosts.names))
  ]


def save(tiers: list[LocalTier], state, step: int, **changes) -> None:
  for tier in tiers:
    tier.save(step, state, **facts_of(state, step, **changes))
  for tier in tiers:
    tier.wait()


def save_all(tmp_path, layout: str, hosts: Hosts, *steps: int, **options) -> None:
  """Keeps steps as a run does that is then killed."""
  tiers = tiers_of(tmp_path, layout, hosts, **options)
  for tier in tiers:
    tier.__enter__()
  for step in steps:
    save(tiers, filled(program(layout).abstract_state, step=step), step)


def tier_that_sees(tmp_path, layout: str) -> LocalTier:
  """Returns the tier of a process that finds the folder `seen`."""
  copies = plan_copies(program(layout).abstract_state, TOGETHER)
  return LocalTier(
    tmp_path / 'seen',
    model_dir=tmp_path / 'model',
    hosts=TOGETHER,
    period=1,
    copies=copies,
    process=0,
    attempt='again',
  )


def restart(tmp_path, layout: str, *, lost: tuple[str, ...] = (), dry_run: bool = False):
  """Returns what a run finds that sees the folders of the hosts which are not lost."""
  run = read_run_id(tmp_path / 'model')
  seen = tmp_path / 'seen' / run
  seen.mkdir(parents=True)
  for host in NAMES:
    for path in (tmp_path / host / run).glob('step_*') if host not in lost else ():
      shutil.copy(path, seen)
  target, tier = program(layout).abstract_state, tier_that_sees(tmp_path, layout)
  with ModelDir(tmp_path / 'model') as model_dir:
    if not dry_run:
      model_dir.lock()
    promoted = promote_local(model_dir, tier, target=target, dry_run=dry_run)
    saved = newest_complete(model_dir, target=target)
    assert promoted is None or dry_run or promoted.step == saved.step
    return promoted or saved


def assert_restored(tmp_path, layout: str, want, *, step: int) -> None:
  checkpointer = Checkpointer(str(tmp_path / 'model'))
  target = program(layout).abstract_state
  restored = checkpointer.restore_latest(target, local=tier_that_sees(tmp_path, layout))
  checkpointer.close()
  assert restored.data_state == b'data of %d' % step
  assert restored.manifest['next_batch_hash'] == f'hash{step}'
  for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(want), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize('hosts', [TOGETHER, APART], ids=['a_process_per_host', 'per_device'])
@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_part_is_kept_on_two_hosts_and_sent_only_where_it_must_be(layout, hosts):
  state = program(layout).abstract_state
  copies = plan_copies(state, hosts)
  arrays = jax.tree.leaves(state)
  devices = list(program(layout).layout.mesh.devices.flat)
  on = collections.defaultdict(list)
  for process, parts in enumerate(copies.by_process):
    for part in parts:
      assert hosts.process_of(devices[part.device]) == process
      on[part.array, part.start].append(hosts.keys[process])
  assert all(len(keys) == 2 == len(set(keys)) for keys in on.values())
  total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
  assert sum(copies.bytes_of) == 2 * total
  for i, array in enumerate(arrays):
    holders = array.sharding.devices_indices_map(array.shape)
    hosts_of = collections.defaultdict(set)
    for device, index in holders.items():
      hosts_of[str(index)].add(hosts.keys[hosts.process_of(device)])
    assert (i in copies.sent) == (min(map(len, hosts_of.values())) == 1)
  # No process carries much more than its share, for any distribution of the parts.
  assert max(copies.bytes_of) <= 1.3 * sum(copies.bytes_of) / len(copies.bytes_of)


@pytest.mark.quick_cases('pp-gpu-004', 'fsdp-gpu-002')
@pytest.mark.parametrize(
  'layout, lost',
  [
    ('dp', 'gpu-001'),
    ('fsdp', 'gpu-002'),
    ('tp', 'gpu-003'),
    ('pp', 'gpu-004'),
    ('hsdp', 'gpu-001'),
  ],
)
def test_any_host_may_be_lost_and_the_step_comes_back_bit_exactly(tmp_path, layout, lost):
  save_all(tmp_path, layout, TOGETHER, 5, 6)
  saved = restart(tmp_path, layout, lost=(lost,))
  assert saved.step == 6 and saved.manifest['next_batch_hash'] == 'hash6'
  want = filled(program(layout).abstract_state, step=6)
  other = {'dp': 'fsdp', 'fsdp': 'tp', 'tp': 'dp'}.get(layout, layout)
  assert_restored(tmp_path, other, want, step=6)
  verdict = verify(StateReader(tmp_path / 'model'), advance=lambda _: None)
  assert not verdict.damaged and not verdict.num_unknown
  assert not (tmp_path / 'model' / '.promoting').exists()


def test_a_process_per_device_is_promoted_by_one_process(tmp_path):
  save_all(tmp_path, 'fsdp_tp', APART, 6)
  assert restart(tmp_path, 'fsdp_tp', lost=('gpu-003',)).step == 6
  assert_restored(tmp_path, 'fsdp_tp', filled(program('fsdp_tp').abstract_state, step=6), step=6)


def test_two_lost_hosts_are_named_and_the_run_starts_from_what_it_has(tmp_path, caplog):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  with caplog.at_level(logging.WARNING):
    assert restart(tmp_path, 'fsdp', lost=('gpu-002', 'gpu-003')) is None
  assert (
    'Local checkpoint 6 cannot be promoted: the parts of process 1 on gpu-002 and process 2 on '
    'gpu-003 are missing'
  ) in caplog.text
  assert 'Continuing from the seed' in caplog.text


def test_a_damaged_copy_is_named_and_the_other_one_used(tmp_path, caplog):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  path = next((tmp_path / 'gpu-002').glob('*/step_6.process_1'))
  file = open_local_file(path)
  content = bytearray(path.read_bytes())
  for part in file.parts:  # in all of them: whichever of a pair is read
    content[file.data_start + part.offset] ^= 1
  path.write_bytes(content)
  with caplog.at_level(logging.WARNING):
    assert restart(tmp_path, 'fsdp').step == 6
  assert 'step_6.process_1' in caplog.text and 'Using its other copy' in caplog.text
  assert_restored(tmp_path, 'fsdp', filled(program('fsdp').abstract_state, step=6), step=6)


def test_parts_that_cannot_be_opened_stop_the_start_unless_another_host_has_them(tmp_path):
  save_all(tmp_path, 'fsdp', TOGETHER, 5, 6)

  def start() -> int:
    target, tier = program('fsdp').abstract_state, tier_that_sees(tmp_path, 'fsdp')
    with ModelDir(tmp_path / 'model') as model_dir:
      return promote_local(model_dir, tier, target=target, dry_run=True).step

  assert restart(tmp_path, 'fsdp', dry_run=True).step == 6
  with refused_to_python('step_6.process_1', errno.EMFILE):
    assert start() == 6
  for parts in ('step_6.', 'step_'):
    with refused_to_python(parts, errno.EMFILE), raises(AccessError):
      start()
  with refused_to_python('run.id', errno.EIO), raises(AccessError):
    start()
  assert start() == 6


def test_without_a_whole_last_step_the_one_before_it_is_taken(tmp_path):
  save_all(tmp_path, 'fsdp', TOGETHER, 5, 6)
  for host in NAMES[:2]:
    for path in (tmp_path / host).glob('*/step_6.*'):
      path.unlink()
  assert restart(tmp_path, 'fsdp').step == 5
  assert_restored(tmp_path, 'fsdp', filled(program('fsdp').abstract_state, step=5), step=5)


def test_parts_of_two_attempts_are_never_put_together(tmp_path):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  kept = {p: p.read_bytes() for host in NAMES[:2] for p in (tmp_path / host).glob('*/step_6.*')}
  save_all(tmp_path, 'fsdp', TOGETHER, 6, attempt='second')
  for path, content in kept.items():
    path.write_bytes(content)
  assert restart(tmp_path, 'fsdp', lost=()) is None


def durable(tmp_path, layout: str, step: int) -> None:
  state = filled(program(layout).abstract_state, step=step)
  with Checkpointer(str(tmp_path / 'model')) as checkpointer:
    checkpointer.save(step, state, **facts_of(state, step))


def test_only_what_is_newer_than_the_last_readable_checkpoint_is_promoted(tmp_path):
  durable(tmp_path, 'fsdp', 6)
  save_all(tmp_path, 'fsdp', TOGETHER, 5, 6)
  before = listing(tmp_path / 'model')
  assert restart(tmp_path, 'fsdp').step == 6
  assert listing(tmp_path / 'model') == before


def test_an_unreadable_checkpoint_of_the_step_makes_room(tmp_path):
  durable(tmp_path, 'fsdp', 6)
  (tmp_path / 'model' / 'checkpoint_6' / 'manifest' / 'metadata').write_text('{')
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  assert restart(tmp_path, 'fsdp').step == 6
  assert (tmp_path / 'model' / 'corrupt_checkpoint_6').is_dir()
  assert_restored(tmp_path, 'fsdp', filled(program('fsdp').abstract_state, step=6), step=6)


@pytest.mark.quick_cases('3-4')
@pytest.mark.parametrize('kept, used', [(6, 6), (8, 8), (3, 4)])
def test_a_checkpoint_whose_arrays_are_damaged_gives_way_to_the_local_step_before_it(
  tmp_path, kept, used
):
  for step in (4, 8):
    durable(tmp_path, 'fsdp', step)
  save_all(tmp_path, 'fsdp', TOGETHER, kept)
  bits = max(jax.tree.leaves(filled(program('fsdp').abstract_state, step=8)), key=lambda x: x.size)
  flip_a_bit(
    tmp_path / 'model/checkpoint_8',
    value=np.asarray(bits.addressable_shards[0].data).tobytes()[:64],
  )
  assert restart(tmp_path, 'fsdp').step == 8  # by its own description
  assert_restored(tmp_path, 'fsdp', filled(program('fsdp').abstract_state, step=used), step=used)
  assert (tmp_path / 'model' / 'corrupt_checkpoint_8').is_dir()


def test_a_dry_run_lists_the_steps_it_would_promote_and_writes_nothing(tmp_path, caplog):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  before = listing(tmp_path)
  with caplog.at_level(logging.INFO):
    saved = restart(tmp_path, 'fsdp', dry_run=True)
  assert saved.step == 6 and saved.data_state == b'data of 6'
  assert 'Local checkpoint 6 would be promoted to checkpoint_6' in caplog.text
  after = listing(tmp_path)
  assert {k: v for k, v in after.items() if not k.startswith('seen')} == before


@pytest.mark.parametrize('name', ['.promoting', '.promoting_0a1b2c3d'])
def test_a_promotion_that_was_killed_leaves_nothing_behind_the_next_start(tmp_path, name):
  save_all(tmp_path, 'dp', TOGETHER, 6)
  staging = tmp_path / 'model' / name
  (staging / 'checkpoint_6' / 'state').mkdir(parents=True)
  assert restart(tmp_path, 'dp', lost=NAMES) is None
  assert not staging.exists()


@pytest.mark.parametrize('kind', ['file', 'link', 'folder of another name'])
def test_what_somebody_else_has_put_into_model_dir_stays(tmp_path, kind):
  save_all(tmp_path, 'dp', TOGETHER, 6)
  theirs = tmp_path / 'model' / '.promoting'
  if kind == 'file':
    theirs.write_text('mine')
  elif kind == 'link':
    theirs.symlink_to(tmp_path)
  else:
    theirs = tmp_path / 'model' / '.promoting_mine'
    theirs.mkdir()
  assert restart(tmp_path, 'dp').step == 6
  assert os.path.lexists(theirs)


@pytest.mark.parametrize('at', ['copied', 'complete'])
def test_a_promotion_that_another_run_has_overtaken_commits_nothing(tmp_path, monkeypatch, at):
  save_all(tmp_path, 'dp', TOGETHER, 6)
  model_dir = tmp_path / 'model'
  theirs = model_dir / '.promoting_0a1b2c3d'

  class Suspended(promotion.StateWriter):
    """A process that is suspended for long, meanwhile another one takes over and promotes."""

    def _sleep(self) -> None:
      lock_of(model_dir, host='gpu-08', kernel='another')
      theirs.mkdir()

    def flush(self) -> None:
      super().flush()
      if at == 'copied' and not theirs.exists():
        self._sleep()

    def close(self, **about) -> None:
      super().close(**about)
      if at == 'complete':
        self._sleep()

  monkeypatch.setattr(promotion, 'StateWriter', Suspended)
  with raises(CheckpointError) as e:
    restart(tmp_path, 'dp')
  assert 'now belongs to process' in e.value.what and 'gpu-08' in e.value.what
  assert sorted(path.name for path in model_dir.iterdir()) == [theirs.name, 'run.id', 'run.lock']


def test_a_start_that_has_lost_model_dir_does_not_remove_the_other_runs_promotion(tmp_path):
  save_all(tmp_path, 'dp', TOGETHER, 6)
  theirs = tmp_path / 'model' / '.promoting_0a1b2c3d'
  tier = tier_that_sees(tmp_path, 'dp')
  with ModelDir(tmp_path / 'model') as model_dir:
    model_dir.lock()
    lock_of(tmp_path / 'model', host='gpu-08', kernel='another')
    theirs.mkdir()
    with raises(CheckpointError):
      promote_local(model_dir, tier, target=program('dp').abstract_state, dry_run=False)
  assert theirs.is_dir()


def test_another_model_is_not_promoted(tmp_path, caplog):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  other = build(Case(dict(fsdp=8), dict(mlp_dim=64))).abstract_state
  tier = LocalTier(
    tmp_path / NAMES[0],
    model_dir=tmp_path / 'model',
    hosts=TOGETHER,
    period=1,
    copies=plan_copies(other, TOGETHER),
    process=0,
    attempt='again',
  )
  with caplog.at_level(logging.WARNING):
    with ModelDir(tmp_path / 'model') as model_dir:
      model_dir.lock()
      assert promote_local(model_dir, tier, target=other, dry_run=False) is None
  assert 'another model' in caplog.text


def test_a_run_in_a_new_model_dir_of_the_same_path_does_not_touch_the_old_runs_files(tmp_path):
  save_all(tmp_path, 'dp', TOGETHER, 6)
  old = listing(tmp_path / NAMES[0])
  shutil.rmtree(tmp_path / 'model')
  save_all(tmp_path, 'dp', TOGETHER, 3)
  assert old.items() <= listing(tmp_path / NAMES[0]).items()
  assert restart(tmp_path, 'dp').step == 3


def test_two_steps_stay_and_a_run_that_ends_well_leaves_nothing(tmp_path):
  tiers = tiers_of(tmp_path, 'dp', TOGETHER)
  for tier in tiers:
    tier.__enter__()
  for step in (1, 2, 3):
    save(tiers, filled(program('dp').abstract_state, step=step), step)
    assert {p.name.split('.')[0] for p in (tmp_path / NAMES[0]).glob('*/step_*')} == {
      f'step_{n}' for n in range(max(step - 1, 1), step + 1)
    }
  for tier in tiers:
    tier.__exit__(None, None, None)
  assert not any(p.is_file() for host in NAMES for p in (tmp_path / host).rglob('*'))
  assert not any((tmp_path / NAMES[0]).iterdir())


def test_a_restart_removes_what_earlier_attempts_have_left_once_it_has_kept_a_step(tmp_path):
  save_all(tmp_path, 'dp', APART, 5, 6)
  # Written again by the process that has this number now, and by no process of this host.
  left = next((tmp_path / NAMES[0]).iterdir()) / 'step_7.process_0.tmp'
  (left.parent / 'step_6.process_1.tmp').write_bytes(b'cut off by a kill')
  left.write_bytes(b'cut off by a kill')
  save_all(tmp_path, 'dp', TOGETHER, 7, attempt='second')
  for host in NAMES:
    names = {p.name.split('.')[0] for p in (tmp_path / host).glob('*/step_*')}
    assert names == {'step_7'}
  assert (left.parent / ABOUT).exists()


def test_a_save_that_fails_is_reported_once_and_tried_again(tmp_path, caplog):
  tiers = tiers_of(tmp_path, 'dp', TOGETHER)
  for tier in tiers:
    tier.__enter__()
  folder = next((tmp_path / NAMES[1]).iterdir())
  shutil.rmtree(folder)
  state = filled(program('dp').abstract_state, step=1)
  with caplog.at_level(logging.WARNING):
    save(tiers, state, 1)
    save(tiers, state, 2)
  assert caplog.text.count('could not be saved') == 1
  assert 'No such file or directory' in caplog.text and 'tries again every 1 steps' in caplog.text
  folder.mkdir()
  save(tiers, state, 3)
  assert [p.name for p in folder.iterdir()] == ['step_3.process_1']


def test_the_start_reports_kept_steps_and_an_earlier_run_of_the_path(tmp_path, caplog):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  shutil.rmtree(tmp_path / 'model')
  config = CheckpointConfig(period=4, local_checkpoint_dir=str(tmp_path / NAMES[0]), local_period=2)
  before = listing(tmp_path)
  with caplog.at_level(logging.INFO):
    tier = open_local_tier(config, ModelDir(tmp_path / 'model'), program('fsdp').abstract_state)
  old = next(p for p in (tmp_path / NAMES[0]).iterdir())
  assert (
    f'local checkpoints: every 2 steps in {tmp_path / NAMES[0]}, the last 2 are kept' in caplog.text
  )
  assert (
    'MB on the only host: they survive killed processes, but not the loss of the host'
    in caplog.text
  )
  assert f'{old} has' in caplog.text and f'of an earlier run in {tmp_path / "model"}' in caplog.text
  assert f'rm -r {old}' in caplog.text and listing(tmp_path) == before
  assert tier.due(2) is tier and tier.due(3) is None
  with raises(CheckpointError):
    open_local_tier(config, ModelDir('s3://bucket/run'), program('fsdp').abstract_state)


def test_a_promotion_waits_for_no_other_run(tmp_path):
  save_all(tmp_path, 'fsdp', TOGETHER, 6)
  other = subprocess.Popen(
    [
      sys.executable,
      '-c',
      (
        'import pathlib, sys; from t5x_gpu.checkpoint.run_lock import RunLock\n'
        'lock = RunLock(pathlib.Path(sys.argv[1])); print("held", flush=True); sys.stdin.read()'
      ),
      str(tmp_path / 'model'),
    ],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  with other:
    assert other.stdout.readline() == 'held\n'
    with raises(CheckpointError):
      restart(tmp_path, 'fsdp')
    other.stdin.close()
  assert not list((tmp_path / 'model').glob('checkpoint_*'))


def test_values_that_are_not_arrays_are_described_as_orbax_does(tmp_path):
  state = TrainState(
    step=jnp.int32(1),
    params={'w': jnp.ones(3)},
    opt_state={
      'chain': optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)).init(
        {'w': jnp.ones(3)}
      ),
      'none': None,
      'dict': {},
      'tuple': (),
      'list': [jnp.ones(3), None],
      'moment': FactoredMoment(full=jnp.ones(3)),
    },
  )
  with Checkpointer(str(tmp_path / 'model')) as checkpointer:
    checkpointer.save(1, state, **facts_of(state, 1))
  tree = json.loads((tmp_path / 'model/checkpoint_1/state/_METADATA').read_text())['tree_metadata']
  empty = {k: v for k, v in tree.items() if v['value_metadata']['skip_deserialize']}
  assert len(empty) >= 6 and empty_leaves(state.saved()) == empty
