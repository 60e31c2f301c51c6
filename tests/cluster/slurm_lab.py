"""A Slurm of several nodes on this machine, private to one folder, without systemd.

    with SlurmLab(folder, num_nodes=2) as lab:
      job = lab.sbatch('--ntasks-per-node=2', 'scripts/train.slurm', 'my.gin')
      lab.wait(job, 'COMPLETED')

Debian's slurmd can play several nodes (-N). The nodes are named 127.0.0.1, 127.0.0.2, ...: names
that resolve everywhere. Its GPUs are device files that nothing opens.
"""

import os
import pathlib
import re
import secrets
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from typing import Any, Optional, Self

DAEMONS = ('munged', 'slurmctld', 'slurmd')
ENDED = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL', 'OUT_OF_MEMORY')
START_SECONDS = 20
STOP_SECONDS = 10

CONFIG = """ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmdSpoolDir={folder}/spool/%n
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
GresTypes=gpu
FirstJobId={first_job}
"""


class SlurmLab:
  """The daemons, with commands to them. As a context manager it leaves no process behind."""

  def __init__(
    self, folder: pathlib.Path, *, num_nodes: int = 2, num_cpus: int = 8, num_gpus: int = 2
  ):
    self.folder = folder.resolve()
    self._num_nodes, self._num_cpus, self._num_gpus = num_nodes, num_cpus, num_gpus
    self.env = {
      **os.environ,
      'SLURM_CONF': str(self.folder / 'slurm.conf'),
      'PATH': os.environ['PATH'] + ':/usr/sbin:/sbin',
    }

  def __enter__(self) -> Self:
    self._write_config()
    try:
      self._start()
    except BaseException:
      self.stop()
      raise
    return self

  def _start(self) -> None:
    munge = self.folder / 'munge'
    self._run(
      [
        'munged',
        *(
          f'--{name}={munge / file}'
          for name, file in (
            ('key-file', 'key'),
            ('socket', 'socket'),
            ('pid-file', 'pid'),
            ('log-file', 'log'),
            ('seed-file', 'seed'),
          )
        ),
        '--num-threads=2',
      ]
    )
    self._run(['slurmctld', '-c'])
    for node in self.nodes:
      self.start_node(node)
    deadline = time.monotonic() + START_SECONDS
    while self._idle_nodes() != len(self.nodes):
      if time.monotonic() > deadline:
        raise AssertionError(
          'Slurm did not come up:\n'
          + '\n'.join(
            f'== {p}\n{p.read_text()[-2000:]}' for p in sorted((self.folder / 'log').iterdir())
          )
        )
      time.sleep(0.05)

  def start_node(self, node: str) -> None:
    self._run(['slurmd', '-c', '-N', node])

  def lose_node(self, node: str) -> None:
    """Kills everything on a node. Slurm notices it after minutes."""
    mark = f'SLURMD_NODENAME={node}'.encode()
    tasks = [pid for pid, environment in self._processes() if mark in environment]
    parents = {_parent(pid) for pid in tasks}
    daemon = int((self.folder / 'run' / f'slurmd.{node}.pid').read_text())
    # First the daemons: they must not tell how the tasks end.
    for pid in [daemon, *(p for p in parents if _name(p) == 'slurmstepd'), *tasks]:
      _kill(pid, signal.SIGKILL)

  def __exit__(self, *exc_info: Any) -> None:
    self.stop()

  @property
  def nodes(self) -> list[str]:
    return [f'127.0.0.{i}' for i in range(1, self._num_nodes + 1)]

  def _write_config(self) -> None:
    for name in ('state', 'log', 'run', 'spool', 'munge', 'dev'):
      (self.folder / name).mkdir(parents=True)
    (self.folder / 'munge').chmod(0o711)
    key = self.folder / 'munge' / 'key'
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    port, node_port = _free_port(), [_free_port() for _ in self.nodes]
    user = subprocess.check_output(['id', '-un'], text=True).strip()
    host = socket.gethostname().split('.')[0]
    # Job ids decide ports: two labs must not count alike.
    text = CONFIG.format(
      folder=self.folder, port=port, user=user, host=host, first_job=port % 4096 + 1
    )
    for node, its_port in zip(self.nodes, node_port):
      text += (
        f'NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={its_port} '
        f'CPUs={self._num_cpus} RealMemory=8000 Gres=gpu:{self._num_gpus} State=UNKNOWN\n'
      )
      (self.folder / 'spool' / node).mkdir()
    text += (
      f'PartitionName=main Nodes={",".join(self.nodes)} Default=YES MaxTime=INFINITE State=UP\n'
    )
    (self.folder / 'slurm.conf').write_text(text)
    # Named, so that slurmd does not look for a cgroup mount, which a container may lack.
    (self.folder / 'cgroup.conf').write_text('CgroupPlugin=cgroup/v1\n')
    (self.folder / 'plugstack.conf').write_text('')
    for i in range(self._num_gpus):
      device = self.folder / 'dev' / f'nvidia{i}'
      try:  # character devices: only for them does Slurm set CUDA_VISIBLE_DEVICES
        os.mknod(device, 0o600 | stat.S_IFCHR, os.makedev(195, i))
      except PermissionError:
        device.touch()
    (self.folder / 'gres.conf').write_text(
      ''.join(
        f'NodeName={node} Name=gpu File={self.folder}/dev/nvidia[0-{self._num_gpus - 1}]\n'
        for node in self.nodes
      )
    )

  def _run(self, command: list[str], **options: Any) -> str:
    done = subprocess.run(
      command,
      env=self.env,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      timeout=30,
      **options,
    )
    assert done.returncode == 0, f'{command}: {done.stdout}'
    return done.stdout

  def _idle_nodes(self) -> int:
    done = subprocess.run(
      ['sinfo', '-h', '-N', '-o', '%T'], env=self.env, text=True, capture_output=True, timeout=30
    )
    return done.stdout.split().count('idle')

  def sbatch(self, *arguments: str, cwd: pathlib.Path, **variables: str) -> int:
    """Returns the id of the submitted job; `variables` are added to its environment."""
    done = subprocess.run(
      ['sbatch', '--parsable', *arguments],
      cwd=cwd,
      text=True,
      timeout=30,
      env={**self.env, **variables},
      capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)

  def scontrol(self, *arguments: str) -> None:
    """Runs scontrol, as an administrator does."""
    self._run(['scontrol', *arguments])

  def srun(self, *arguments: str) -> list[str]:
    """Returns the lines that a separate job prints."""
    return self._run(['srun', *arguments]).splitlines()

  def job(self, number: int | str) -> dict[str, str]:
    """Returns what scontrol shows of a job (or of ARRAY_TASK): JobState, Restarts, ExitCode, ..."""
    return dict(
      re.findall(r'(\w+)=(\S*)', self._run(['scontrol', 'show', 'job', str(number), '-o']))
    )

  def wait(self, number: int | str, *states: str, seconds: float) -> dict[str, str]:
    """Returns the job once it is in one of `states`, any end by default."""
    deadline = time.monotonic() + seconds
    while (job := self.job(number))['JobState'] not in (states or ENDED):
      assert time.monotonic() < deadline, f'{job["JobState"]} after {seconds} s'
      assert job['JobState'] not in ENDED, job['JobState']
      time.sleep(0.1)
    return job

  def signal_batch(self, number: int | str, name: str) -> None:
    """Sends a signal to the batch script alone, as --signal=B: does before the time limit."""
    self._run(['scancel', f'--signal={name}', '--batch', str(number)])

  def stop(self) -> None:
    """Ends jobs, daemons, and any processes that outlived them."""
    ids = subprocess.run(
      ['squeue', '-h', '-o', '%A'], env=self.env, text=True, capture_output=True
    ).stdout.split()
    if ids:
      subprocess.run(['scancel', '--signal=KILL', '--full', *ids], env=self.env)
      subprocess.run(['scancel', *ids], env=self.env)
    for file in (*(self.folder / 'run').glob('*.pid'), self.folder / 'munge' / 'pid'):
      if file.exists() and _name(pid := int(file.read_text())) in DAEMONS:
        _end(pid)
    for pid, _ in self._processes():
      _kill(pid, signal.SIGKILL)

  def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
    """Yields step daemons and processes of jobs, with their environments."""
    # They carry the name of this cluster's configuration, also if they have lost their daemon.
    mark = f'SLURM_CONF={self.folder}/slurm.conf'.encode()
    for path in pathlib.Path('/proc').glob('[0-9]*/environ'):
      try:
        environment = path.read_bytes().split(b'\0')
      except OSError:
        continue
      pid = int(path.parent.name)
      if (
        mark in environment
        and pid != os.getpid()
        and (_name(pid) == 'slurmstepd' or any(e.startswith(b'SLURM_JOB_ID=') for e in environment))
      ):
        yield pid, environment


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def _name(pid: int) -> Optional[str]:
  """Returns the command of a process; None if it has ended, also as a zombie."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except OSError:
    return None
  name, state = re.search(r'\((.*)\) (\S)', text).groups()
  return None if state == 'Z' else name


def _parent(pid: int) -> int:
  try:
    return int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
  except OSError:
    return 0


def _kill(pid: int, number: int) -> None:
  try:
    os.kill(pid, number)
  except ProcessLookupError:
    pass


def _end(pid: int) -> None:
  _kill(pid, signal.SIGTERM)
  deadline = time.monotonic() + STOP_SECONDS
  while _name(pid) is not None and time.monotonic() < deadline:
    time.sleep(0.02)
  _kill(pid, signal.SIGKILL)
