"""A step that cannot be compiled is an error with a fix; other errors are not changed."""

import jax
import pytest

from t5x_gpu.errors import ConfigError, ModelError
from t5x_gpu.runtime.xla.programs import compile_errors
from tests.helpers_train import Project
from tests.messages import raises


@pytest.mark.parametrize(
  'error',
  [
    jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes\nof a fusion"),
    ValueError('Mosaic GPU kernel exceeds available shared memory'),
    NotImplementedError('Unimplemented primitive in Pallas GPU lowering'),
  ],
)
def test_an_error_of_the_compiler_names_the_settings_to_change(error):
  with raises(ModelError), compile_errors('NVIDIA H100'):
    raise error


@pytest.mark.parametrize(
  'error', [jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory'), ConfigError('wrong')]
)
def test_other_errors_pass(error):
  with pytest.raises(type(error)) as e, compile_errors('NVIDIA H100'):
    raise error
  assert e.value is error


@pytest.mark.parametrize('flags', [(), ('--precompile',)])
def test_a_run_that_does_not_compile_ends_with_that_error(flags, tmp_path, monkeypatch):
  compiles = jax.stages.Lowered.compile

  def fails(lowered, compiler_options=None, **more):
    if 'train_step' in lowered.as_text()[:200]:
      raise jax.errors.JaxRuntimeError("INTERNAL: Couldn't find output tile sizes")
    return compiles(lowered, compiler_options, **more)

  monkeypatch.setattr(jax.stages.Lowered, 'compile', fails)
  done = Project(tmp_path).run(*flags, num_devices=1)
  assert done.code == 1 and 'cannot be compiled for cpu' in done.out + done.err
  assert 'Traceback' not in done.out + done.err
