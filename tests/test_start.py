"""What a run on prepared rows imports: no TensorFlow or PyTorch, which take seconds and memory."""

import pathlib
import shutil
import subprocess
import sys

from tests.helpers_xla import xla_flags

ROOT = pathlib.Path(__file__).parents[1]
ROWS = pathlib.Path(__file__).parent / 'golden' / 'from_30213db'
RUN = """
import sys
from t5x_gpu import train
code = train.main(['--gin_file=prepared.gin', '--gin.TRAIN_STEPS=1', '--gin.EVAL_PERIOD=None'])
names = ('tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio', 't5', 'torch', 'boto3')
print('imported:', *(name for name in names if name in sys.modules))
sys.exit(code)
"""


def test_a_run_on_prepared_rows_does_not_import_tensorflow_or_torch(tmp_path):
  folder = tmp_path / 'old'
  shutil.copytree(ROWS, folder, ignore=shutil.ignore_patterns('*_run', 'text'))
  environment = {
    'HOME': str(tmp_path),
    'JAX_PLATFORMS': 'cpu',
    'PATH': '/usr/bin:/bin',
    'PYTHONPATH': str(ROOT),
    'XLA_FLAGS': xla_flags(),
  }
  done = subprocess.run(
    [sys.executable, '-c', RUN],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'step 1/1' in done.stdout
  assert done.stdout.splitlines()[-1] == 'imported:', done.stdout
