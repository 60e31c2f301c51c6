"""Lines of files that an interrupted write must not spoil."""

from t5x_gpu.config.atomic_write import append_line


def test_a_line_that_was_cut_short_spoils_only_itself(tmp_path):
  path = tmp_path / 'lines'
  append_line(path, 'first')
  path.write_bytes(path.read_bytes() + b'sec')
  append_line(path, 'third')
  append_line(path, 'fourth')
  assert path.read_text() == 'first\nsec\nthird\nfourth\n'
