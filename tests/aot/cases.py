"""The training steps that `make test-aot` compiles: models, layouts, precisions and GPUs."""

import dataclasses
import pathlib

from t5x_gpu.config import gin_loader
from t5x_gpu.tools.planning.gpu_compile import CompiledStep, compile_step
from t5x_gpu.tools.planning.gpu_targets import described_gpus
from t5x_gpu.tools.planning.prediction import PlanConfig

GIN = pathlib.Path(__file__).parents[2] / 'gin_configs'
# What a gin file of a user adds to a model, a layout and a run.
RUN = ("MODEL_DIR = 'unused'", "MIXTURE_OR_TASK_NAME = 'unused'", 'TRAIN_STEPS = 100')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A training step and the GPUs that it is compiled for.

  Attributes:
    model, layout: of gin_configs/models and gin_configs/parallel.
    batch: rows and length.
    gpu, hosts, gpus_per_host: as in `described_gpus`.
    bindings: further gin bindings.
    label: distinguishes cases that are otherwise the same.
  """

  model: str
  layout: str
  batch: tuple[int, int]
  gpu: str = 'h100'
  hosts: int = 1
  gpus_per_host: int = 8
  bindings: tuple[str, ...] = ()
  label: str = ''

  @property
  def name(self) -> str:
    size = f'{self.hosts}x{self.gpus_per_host}'
    return ' '.join(filter(None, (self.model, self.layout, self.gpu, size, self.label)))

  def config(self) -> PlanConfig:
    rows, length = self.batch
    lengths = {'targets': length}
    if self.model.startswith('t5'):
      lengths['inputs'] = length
    loaded = gin_loader.load(
      [
        str(GIN / 'models' / f'{self.model}.gin'),
        str(GIN / 'parallel' / f'{self.layout}.gin'),
        str(GIN / 'runs' / 'pretrain.gin'),
      ],
      bindings=[*RUN, f'BATCH_SIZE = {rows}', f'TASK_FEATURE_LENGTHS = {lengths}', *self.bindings],
      search_paths=[],
    )
    return gin_loader.configured(loaded, PlanConfig)

  def compiled(self) -> CompiledStep:
    gpus = described_gpus(self.gpu, num_hosts=self.hosts, gpus_per_host=self.gpus_per_host)
    return compile_step(self.config(), gpus)


def _small(layout: str, *, model: str = 'decoder_base', **changes) -> Case:
  """Without remat; decoder_base has 134M parameters and a relative position bias."""
  return Case(model=model, layout=layout, batch=(64, 512), **changes)


def _llama(layout: str, *bindings: str, model: str = 'llama3_2_1b', rows: int = 32, **changes):
  """Packed rows, grouped heads, rotary positions, full remat."""
  return Case(
    model=model,
    layout=layout,
    batch=(rows, 4096),
    bindings=("REMAT_POLICY = 'full'", *bindings),
    **changes,
  )


BERT = "HEAD = 'mlm'", "TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 512}"
T5 = ("DTYPE = 'bfloat16'",)

CASES = (
  # Layouts, on one host and on several.
  _small('dp'),
  _small('zero1'),
  _small('fsdp'),
  _llama('dp', rows=64),
  Case(model='gpt2_xl', layout='dp', batch=(64, 1024), bindings=("REMAT_POLICY = 'full'",)),
  _llama('fsdp'),
  _llama('hsdp', hosts=8, rows=256),
  _llama('fsdp', hosts=8, rows=256),
  _llama('tp'),
  _llama('tp_sp'),
  _llama('cp'),
  _llama('fsdp', model='llama3_8b', rows=8),
  _llama('hsdp', model='llama3_8b', hosts=8, rows=64),
  # Other models of the comparison with MaxText in docs/performance.md.
  _llama('fsdp', model='qwen3_1_7b'),
  _llama('fsdp', model='gemma2_2b'),
  *(
    Case(
      model=model,
      layout='fsdp',
      batch=batch,
      bindings=("REMAT_POLICY = 'dots'", *bindings),
      label='dots',
    )
    for model, batch, bindings in (
      ('gpt2_xl', (64, 1024), ()),
      ('bert_large', (128, 512), BERT),
      ('t5_1_1_large', (64, 512), T5),
    )
  ),
  _small('3d'),
  _small('pp'),
  _small('3d', bindings=("train.xla_preset = 'max_overlap'",), label='max_overlap'),
  _small('pp', bindings=('Partitioner.overlap_layers = True',), label='overlap_layers'),
  _small('ep', model='decoder_moe_demo'),
  _small('fsdp', model='t5_1_1_base', bindings=T5),
  # One GPU: layers without a loop, which would copy stored activations.
  Case(model='decoder_base', layout='dp', batch=(8, 512), gpus_per_host=1),
  Case(
    model='decoder_base',
    layout='dp',
    batch=(8, 512),
    gpus_per_host=1,
    bindings=("PRECISION = 'fp8'",),
    label='fp8',
  ),
  # Remat: as many kernels as without it.
  _small('fsdp', bindings=("REMAT_POLICY = 'dots'",), label='dots'),
  *(
    _llama('fsdp', f'REMAT_POLICY = {policy!r}', model='llama3_8b', rows=8, label=policy)
    for policy in ('minimal', 'dots')
  ),
  # No loop: XLA stores what it computes again with overlap_layers.
  _llama(
    'fsdp', "REMAT_POLICY = 'none'", 'Partitioner.overlap_layers = False', label='none, no overlap'
  ),
  # Two loops, with a policy each.
  _llama(
    'fsdp',
    "REMAT_POLICY = 'attention'",
    'TransformerConfig.full_remat_layers = 4',
    label='two policies',
  ),
  # A step that fills the GPU: XLA expects it to need more.
  Case(
    model='llama3_8b',
    layout='fsdp',
    batch=(16, 8192),
    bindings=("REMAT_POLICY = 'dots'",),
    label='full GPU',
  ),
  # Microbatches: the activations of one at a time.
  _small(
    'fsdp',
    bindings=(
      "REMAT_POLICY = 'dots'",
      'NUM_MICROBATCHES = 4',
      "Partitioner.accumulate_by = 'microbatch'",
    ),
    label='by microbatch',
  ),
  # Where no parameter is gathered, each layer's gradients are added in place.
  _small('dp', bindings=('NUM_MICROBATCHES = 4',), label='by microbatch'),
  _small(
    'dp',
    bindings=('NUM_MICROBATCHES = 4', 'TransformerConfig.scan_unroll = 1'),
    label='by microbatch, in a loop',
  ),
  # The same on one GPU.
  Case(
    model='llama3_2_1b',
    layout='dp',
    batch=(8, 4096),
    gpus_per_host=1,
    bindings=("REMAT_POLICY = 'minimal'", 'NUM_MICROBATCHES = 8'),
    label='by microbatch',
  ),
  # The default: one layer after the other.
  _llama('fsdp', 'NUM_MICROBATCHES = 4', rows=64, label='by layer'),
  # XLA would end the process without the preset.
  _small('hsdp', hosts=2, bindings=('NUM_MICROBATCHES = 4',), label='by layer'),
  # Precision.
  _llama('fsdp', "PRECISION = 'fp8'", label='fp8'),
  _llama('fsdp', "PRECISION = 'fp8'", model='llama3_8b', label='fp8'),
  _llama('fsdp', "PRECISION = 'fp8'", model='llama3_8b', rows=8, label='fp8, a row per GPU'),
  _llama('hsdp', "PRECISION = 'fp8'", hosts=8, rows=256, label='fp8'),
  _small('3d', bindings=("PRECISION = 'fp8'",), label='fp8'),
  _small(
    'dp',
    bindings=("Partitioner.gradient_dtype = 'bfloat16'", 'Partitioner.overlap_layers = True'),
    label='gradients in bfloat16',
  ),
  # GPUs.
  _llama('fsdp', gpu='a100-80'),
  _small('fsdp', gpu='h200'),
  _small('fsdp', gpu='b200'),
)
