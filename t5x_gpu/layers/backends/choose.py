"""Chooses an attention backend: by name, or the best one for a stack on the mesh's devices.

`BACKENDS` lists the features that each backend supports; docs/attention.md shows it as a table.
`choose` compares it with the `AttentionNeed` of a stack, and returns the reason with its choice.
"""

import contextlib
import contextvars
import dataclasses
import importlib.util
from collections.abc import Iterator, Sequence
from typing import Optional

import jax
from jax.extend import backend

from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.layers.backends.context import kernel_context_attention
from t5x_gpu.layers.backends.kinds import Attention, AttentionKind
from t5x_gpu.layers.backends.plain import ChunkedAttention, ContextAttention, DenseAttention
from t5x_gpu.layers.backends.tokamax import tokamax_attention
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.runtime.main_log import log_once
from t5x_gpu.terminal.console import show

# Listed head sizes of kernels are sizes whose forward and backward passes compile for the GPU.

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


# Values that a run may request.
REQUESTS = ('auto', 'dense', 'chunked', 'tokamax')
PARAMETER = 'TransformerConfig.attention'
# Names of other libraries and of kernels -> request to use instead.
_INSTEAD = {
  **dict.fromkeys(
    ('flash', 'flash_attention', 'mosaic', 'mosaic_gpu', 'triton', 'pallas'),
    "'tokamax' has these kernels, Mosaic or Triton by GPU.",
  ),
  'cudnn': "cuDNN is not a backend, because its packed rows need a private call of JAX: 'tokamax' "
  'takes its place.',
}

# Rows up to this length use dense attention if no kernel supports them. CPU time of dense attention
# and of blocks of 128 (benchmarks/attention_cpu.py): 325 and 364 ms at length 256, 881 and 578 ms
# at length 512.
LONGEST_DENSE = 256
# Limit for the arrays that a kernel stores per layer: unsummed gradients of a relative bias, per
# row and head, and the mask of Triton's backward pass.
MOST_STORED_BYTES = 2**30

_listed: contextvars.ContextVar[Optional[list['Choice']]] = contextvars.ContextVar(
  'listed', default=None
)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A backend, and why it was chosen.

  Attributes:
    name: key of `BACKENDS`.
    reason: the reason in a few words, for the log.
    no_kernel: why no GPU kernel computes the attention; '' if a kernel does.
    remedy: the change that would allow a kernel.
  """

  name: str
  reason: str
  no_kernel: str = ''
  remedy: str = ''

  def __str__(self) -> str:
    return f'attention: {self.name} ({self.reason})'


@contextlib.contextmanager
def listed_choices() -> Iterator[list[Choice]]:
  """Context that lists the distinct choices of all tracing within it.

  The log only has choices that the process has not logged before.
  """
  token = _listed.set([])
  try:
    yield _listed.get()
  finally:
    _listed.reset(token)


def hint(value: object) -> str:
  """Returns a list of `REQUESTS`, with a suggestion for an unknown request."""
  instead = _INSTEAD.get(str(value).lower())
  meant = did_you_mean(value, REQUESTS) if instead is None else f' {instead}'
  return ', '.join(REQUESTS) + '.' + meant


def choose(request: str, need: AttentionNeed, device: Hardware) -> Choice:
  """Returns the backend for `need` on `device`.

  Args:
    request: one of `REQUESTS`.
    need: requirements of the stack.
    device: hardware that the step runs on.
  Raises:
    ModelError: the requested backend does not support the stack on the device.
  """
  of = f'{device.kind}, {need.dtype}, heads of {need.head_dim}'
  if need.context is not None:
    of += f'; {need.context} over context'
  if request == 'auto':
    return _best(need, device, of)
  named = [name for name in BACKENDS if name.split()[0] == request]
  for name in named:
    if not lacks(BACKENDS[name], need, device):
      return _asked_for(name, need, device, of)
  # Backends for this device; if there are none, backends for its platform.
  near = [name for name in named if not hardware_lacks(BACKENDS[name], device)] or [
    name for name in named if BACKENDS[name].platform in (None, device.platform)
  ]
  reasons = '; '.join(f'{name}: {", ".join(lacks(BACKENDS[name], need, device))}' for name in near)
  able = list(dict.fromkeys(name.split()[0] for name in that_serve(need, device)))
  raise ModelError(
    f'attention = {request!r} cannot serve this run ({of}). {reasons}.',
    fix=f"Set {PARAMETER} = 'auto', or {' or '.join(repr(name) for name in able)}.",
    docs='attention.md',
    parameters=[PARAMETER],
  )


def _asked_for(name: str, need: AttentionNeed, device: Hardware, of: str) -> Choice:
  choice, best = Choice(name, f'requested; {of}'), _best(need, device, of)
  if device.platform != 'gpu' or BACKENDS[name].platform == 'gpu':
    return choice
  reason = best.no_kernel or f'{PARAMETER} = {name!r}'
  return dataclasses.replace(
    choice, no_kernel=reason, remedy=best.remedy or f"{PARAMETER} = 'auto'"
  )


def _best(need: AttentionNeed, device: Hardware, of: str) -> Choice:
  kernels = [name for name in BACKENDS if BACKENDS[name].platform == 'gpu']
  able = [name for name in kernels if not lacks(BACKENDS[name], need, device)]
  positions = (need.q_length or 0) * (need.kv_length or 0)
  stored = {
    'bias gradients': need.relative_bias * 2 * positions * (need.rows_and_heads or 0),
    'masks': bool(able) and BACKENDS[able[0]].stores_mask * positions * (need.rows or 0),
  }
  why_not, no_kernel, remedy = '', '', ''
  if able and sum(stored.values()) <= MOST_STORED_BYTES:
    return Choice(able[0], of)
  if able:
    gib = ' and '.join(f'{show(n, GiB=".1f")} of {what}' for what, n in stored.items() if n)
    why_not = no_kernel = f'a kernel would store {gib}'
    remedy = 'more NUM_MICROBATCHES or shorter rows, which store less'
  elif device.platform == 'gpu':
    # The kernel with the fewest missing features, preferably one for this GPU.
    name = min(kernels, key=lambda name: len(lacks(BACKENDS[name], need, device)))
    no_kernel = f'{name}: {lacks(BACKENDS[name], need, device)[0]}'
    why_not = f'no kernel, {no_kernel}'
    remedy = 'a model or GPU that a kernel serves (docs/attention.md)'
    if need.dtype not in BACKENDS[name].dtypes:
      remedy = f'TransformerConfig.dtype = {BACKENDS[name].dtypes[0]!r}'
  because = f'; {why_not}' if why_not else ''
  if need.context is not None:
    name, reason = 'chunked', f'{device.kind}; {need.context} over context{because}'
  else:
    name = 'chunked' if positions > LONGEST_DENSE**2 else 'dense'
    reason = f'{device.kind}, rows of {max(need.q_length or 0, need.kv_length or 0)}{because}'
  return Choice(name, reason, no_kernel, remedy)


def make_attention(
  kind: AttentionKind,
  info: TokenInfo,
  kv_info: Optional[TokenInfo] = None,
  *,
  need: Optional[AttentionNeed] = None,
  request: Optional[str] = None,
) -> Attention:
  """Returns the attention of a batch, over `context` if the active rules split the length.

  Args:
    kind: attention of the stack.
    info: positions and segments of the queries, and of the keys unless `kv_info` is given.
    kv_info: positions and segments of the encoder's tokens or of the slots of a cache.
    need: dtype, head size and features of the stack; its lengths are filled in here.
    request: one of `REQUESTS`; None for plain JAX without a choice (decoding).
  Raises:
    ModelError: as `choose`.
  """
  choice = Choice('dense' if context_method() is None else 'chunked', '')
  if request is not None:
    rows, q_length = info.segments.shape
    kv_length = (info if kv_info is None else kv_info).segments.shape[-1]
    if context_method() == 'gather':
      kv_length *= jax.lax.axis_size('context')
    need = dataclasses.replace(
      need,
      q_length=q_length,
      kv_length=kv_length,
      rows=rows,
      rows_and_heads=rows * (need.rows_and_heads or 1),
      context=context_method(),
    )
    choice = choose(request, need, hardware())
    log_once(str(choice))
    listed = _listed.get()
    if listed is not None and choice not in listed:
      listed.append(choice)
  return attention_by(choice.name, kind, info, kv_info)


def attention_by(
  name: str, kind: AttentionKind, info: TokenInfo, kv_info: Optional[TokenInfo] = None
) -> Attention:
  """Returns the attention of a batch, computed by the backend `name`, without checks."""
  kv, is_split = info if kv_info is None else kv_info, context_method() is not None
  if name == 'chunked':
    return (ContextAttention if is_split else ChunkedAttention)(info, kv, kind)
  if name == 'dense':
    return DenseAttention(info, kv, kind.mask(info, kv), kind, whole_rows=kv_info is None)
  _, kernel, *_ = name.split()
  make = kernel_context_attention if is_split else tokamax_attention
  return make(kind, info, kv_info, kernel=kernel, multiple=BACKENDS[name].multiple)


def check(request: str, need: AttentionNeed, device: jax.Device) -> None:
  """Raises ModelError if a backend requested by name does not support `need` on `device`."""
  if request != 'auto':
    choose(request, need, Hardware.of(device))
