"""Launch scripts are written into a folder, but never over a changed file."""

from t5x_gpu import launch
from t5x_gpu.errors import ConfigError
from tests.messages import raises


def test_changed_scripts_are_not_overwritten(tmp_path, capsys):
  flag = f'--write_scripts={tmp_path / "a/b"}'
  assert launch.main([flag]) == launch.main([flag]) == 0
  assert capsys.readouterr().out.count('train.slurm') == 2
  path = tmp_path / 'a/b/train.slurm'
  path.write_text(path.read_text() + '# mine\n')
  (tmp_path / 'a/b/train.pbs').unlink()
  with raises(ConfigError):
    launch.main([flag])
  with raises(ConfigError):
    launch.main([f'--write_scripts={path}'])
  assert path.read_text().endswith('# mine\n')
  assert not (tmp_path / 'a/b/train.pbs').exists()
