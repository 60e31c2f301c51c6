"""gloo listens on the run's network, and no run depends on how jaxlib is asked for that."""

import pytest
from jax._src import lib as jax_lib

from t5x_gpu.runtime.cluster import coordination

MAKE = 'make_gloo_tcp_collectives'


def test_gloo_is_given_the_address(monkeypatch):
  given = []
  monkeypatch.setattr(jax_lib._jax, MAKE, lambda **options: given.append(options))
  coordination.let_gloo_listen_on('127.0.0.2')
  getattr(jax_lib._jax, MAKE)(distributed_client='client')
  assert given == [{'hostname': '127.0.0.2', 'distributed_client': 'client'}]


@pytest.mark.parametrize('error', [TypeError('no such argument'), RuntimeError('no such address')])
def test_gloo_chooses_itself_where_it_does_not_take_the_address(monkeypatch, caplog, error):
  def make(**options):
    if 'hostname' in options:
      raise error
    return options

  monkeypatch.setattr(jax_lib._jax, MAKE, make)
  coordination.let_gloo_listen_on('127.0.0.2')
  assert getattr(jax_lib._jax, MAKE)(distributed_client='client') == {
    'distributed_client': 'client'
  }
  assert f'gloo cannot listen on 127.0.0.2 and chooses an address itself: {error}' in caplog.text


def test_a_jaxlib_without_it_starts_all_the_same(monkeypatch):
  monkeypatch.delattr(jax_lib._jax, MAKE)
  coordination.let_gloo_listen_on('127.0.0.2')
  assert not hasattr(jax_lib._jax, MAKE)
