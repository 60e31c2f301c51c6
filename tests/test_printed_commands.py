"""Commands that messages print can be pasted into a shell, with any path in them."""

import re

from t5x_gpu.cli import check_folders_of
from t5x_gpu.errors import ConfigError
from tests.helpers_train import REPOSITORY
from tests.messages import raises

_COMMAND = re.compile(r'(?:python -m t5x_gpu\.\w+ |mkdir -p |tensorboard --logdir )(.*)')
_VALUE = re.compile(r'(?:=| |^)\{(\w+)([^}]*)\}')  # a flag's value or an argument
_WORDS = {'split', 'which', 'written'}  # without spaces, or not part of the command


def test_paths_in_printed_commands_are_quoted():
  wrong = []
  for path in sorted((REPOSITORY / 't5x_gpu').rglob('*.py')):
    text = path.read_text()
    for line in text.splitlines():
      for command in _COMMAND.findall(line):
        wrong += [
          f'{path.relative_to(REPOSITORY)}: {line.strip()}'
          for name, rest in _VALUE.findall(command)
          if not (rest.startswith('.quote(') or name == '_quoted' or name in _WORDS)
          and not re.search(rf'\b{name}\b.* = shlex\.quote\(', text)
        ]
  assert not wrong


def test_the_folder_of_an_output_is_quoted_or_named_as_a_file(tmp_path):
  with raises(ConfigError) as e:
    check_folders_of(f'{tmp_path}/my runs/out.json')
  assert e.value.fix == f"Create it first: mkdir -p '{tmp_path}/my runs'"
  (tmp_path / 'file').touch()
  with raises(ConfigError) as e:
    check_folders_of(f'{tmp_path}/file/out.json')
  assert 'is a file, not a folder' in e.value.what
