"""The features that each attention backend supports; docs/attention.md shows them as a table.

The listed head sizes of kernels are sizes whose forward and backward passes compile for the GPU.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Optional

import jax
from jax.extend import backend

# Lowest compute capability, and first capability that is excluded.
Capabilities = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Serves:
  """One row of the table.

  Attributes:
    name: backend, and its kernel.
    gpus: names of the supported devices, as text.
    platform: 'cpu' or 'gpu'; None for any.
    capabilities: compute capabilities of supported GPUs; None for any.
    dtypes: supported dtypes of queries, keys and values; () for any.
    head_dims: smallest and largest number of features per head; None for any.
    softcap, relative_bias: whether it supports the feature with its gradient.
    softcap_with_bias: whether it supports both together: the cap first, then the bias.
    context: whether it supports rows that are split over `context`.
    stores_mask: whether its backward pass stores a boolean mask [batch, length, length].
    multiple: rows are padded to a multiple of this length.
    memory: description of the largest array of a layer, besides queries, keys and values.
  """

  name: str
  gpus: str
  memory: str
  platform: Optional[str] = None
  capabilities: Optional[Capabilities] = None
  dtypes: tuple[str, ...] = ()
  head_dims: Optional[tuple[int, int]] = None
  softcap: bool = True
  relative_bias: bool = True
  softcap_with_bias: bool = True
  context: bool = True
  stores_mask: bool = False
  multiple: int = 1


# Features that all backends support; their numeric tests have a case for each.
SERVED_BY_ALL = (
  'packed rows',
  'padding',
  'prefixes',
  'sliding windows',
  'grouped heads',
  'encoders',
  'attention to an encoder',
  'odd lengths',
)

BACKENDS = {
  serves.name: serves
  for serves in (
    Serves('dense', 'any', 'logits [batch, heads, length, length]', context=False),
    Serves('chunked', 'any', 'one block of logits; after a gather over `context`, all of a device'),
    Serves(
      'tokamax mosaic_gpu',
      'Hopper (H100, H200)',
      'none; with a relative bias its gradient [batch, heads, length, length]',
      'gpu',
      (9.0, 10.0),
      ('bfloat16',),
      (1, 256),
      softcap_with_bias=False,
      multiple=128,
    ),
    Serves(
      'tokamax mosaic_gpu sm100',
      'data-center Blackwell (B200, GB200)',
      'none',
      'gpu',
      (10.0, 11.0),
      ('bfloat16',),
      (1, 64),
      relative_bias=False,  # 300 bytes of shared memory too many (tokamax 0.0.12)
      multiple=128,
    ),
    Serves(
      'tokamax triton',
      'Ampere and later (A100, A10, L4, L40S, RTX)',
      'a boolean mask [batch, length, length] in the backward pass',
      'gpu',
      (8.0, float('inf')),
      ('bfloat16',),
      (1, 128),
      softcap=False,
      softcap_with_bias=False,
      stores_mask=True,
    ),
    # Follows the code path of kernels, with Tokamax's definition of attention in place of a kernel.
    Serves(
      'tokamax reference',
      'CPU, for tests',
      'logits [batch, heads, length, length]',
      'cpu',
      softcap_with_bias=False,
    ),
  )
}


@dataclasses.dataclass(frozen=True)
class Hardware:
  """The device that a step runs on.

  Attributes:
    platform: 'cpu' or 'gpu'.
    kind: name of the device.
    capability: CUDA compute capability of a GPU; None if unknown.
    has_packages: whether to assume that the packages of all kernels are installed (for a plan).
  """

  platform: str
  kind: str
  capability: Optional[float] = None
  has_packages: bool = False

  @classmethod
  def of(cls, device: jax.Device) -> 'Hardware':
    capability = getattr(device, 'compute_capability', None)
    return cls(
      device.platform, device.device_kind, None if capability is None else float(capability)
    )


def hardware() -> Hardware:
  """Returns the hardware of the active mesh; without a mesh, of JAX's default device."""
  found = Hardware.of(backend.get_default_device())
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None or device.device_kind == found.kind:
    return found
  return Hardware(device.platform, device.device_kind)


@dataclasses.dataclass(frozen=True)
class AttentionNeed:
  """Requirements of a stack's attention on a backend.

  Attributes:
    dtype: dtype of queries, keys and values.
    head_dim: features of a head.
    softcap, relative_bias: whether the attention has a cap or a bias.
    q_length, kv_length: number of positions of a row; None if not known yet.
    rows: number of rows on a device; None if not known yet.
    rows_and_heads: number of rows on a device times its query heads; None if not known yet.
    context: how keys reach the queries of rows that are split over `context`, 'ring' or 'gather';
      None for whole rows.
  """

  dtype: str
  head_dim: int
  softcap: bool = False
  relative_bias: bool = False
  q_length: Optional[int] = None
  kv_length: Optional[int] = None
  rows: Optional[int] = None
  rows_and_heads: Optional[int] = None
  context: Optional[str] = None


def hardware_lacks(serves: Serves, device: Hardware) -> list[str]:
  """Returns reasons why `serves` does not run on `device` at all; [] if it does."""
  found = []
  if serves.platform not in (None, device.platform):
    found.append(f'it runs on {serves.gpus}, not on {device.kind}')
  elif serves.capabilities is not None:
    low, high = serves.capabilities
    if device.capability is None or not low <= device.capability < high:
      of = 'unknown' if device.capability is None else device.capability
      found.append(f'it runs on {serves.gpus}; {device.kind} has compute capability {of}')
  return found


def lacks(serves: Serves, need: AttentionNeed, device: Hardware) -> list[str]:
  """Returns a phrase for each feature that `serves` lacks for `need` on `device`; [] if none."""
  found = hardware_lacks(serves, device)
  package, kernel = serves.name.split()[0], ' ' in serves.name
  if kernel and not device.has_packages and importlib.util.find_spec(package) is None:
    found.insert(0, f'{package} is not installed')
  if serves.dtypes and need.dtype not in serves.dtypes:
    found.append(f'it computes in {" or ".join(serves.dtypes)}, not in {need.dtype}')
  if serves.head_dims is not None and not (
    serves.head_dims[0] <= need.head_dim <= serves.head_dims[1]
  ):
    low, high = serves.head_dims
    found.append(f'it takes heads of {low} to {high} features, not {need.head_dim}')
  if need.softcap and not serves.softcap:
    found.append('its backward pass has no cap on attention logits')
  elif need.softcap and need.relative_bias and not serves.softcap_with_bias:
    found.append('it adds a relative bias before the cap on logits, not after')
  if need.relative_bias and not serves.relative_bias:
    found.append('it has no gradient of the relative bias')
  if need.context is not None and not serves.context:
    found.append('it does not serve rows that are split over context')
  return found


def that_serve(need: AttentionNeed, device: Hardware) -> Sequence[str]:
  """Returns the names of all backends that support `need` on `device`."""
  return [name for name, serves in BACKENDS.items() if not lacks(serves, need, device)]


def table() -> str:
  """Returns `SERVED_BY_ALL` and `BACKENDS` as the Markdown table of docs/attention.md."""
  columns = (
    'backend',
    'devices',
    'dtypes',
    'heads',
    'softcap',
    'relative bias',
    'context',
    'stores',
  )

  def yes(it: bool) -> str:
    return 'yes' if it else 'no'

  rows = [
    (
      f'`{b.name}`',
      b.gpus,
      ', '.join(b.dtypes) or 'any',
      'any' if b.head_dims is None else f'up to {b.head_dims[1]}',
      yes(b.softcap),
      yes(b.relative_bias) + ('' if b.softcap_with_bias else ', not with softcap'),
      yes(b.context),
      b.memory,
    )
    for b in BACKENDS.values()
  ]
  everywhere = ('all', f'also serve {", ".join(SERVED_BY_ALL)}', *('',) * (len(columns) - 2))
  lines = [columns, ('---',) * len(columns), *rows, everywhere]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines) + '\n'
