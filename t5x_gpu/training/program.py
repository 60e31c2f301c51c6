"""The jitted functions of a run, and shapes and shardings of all their arrays: `Program`.

Every command that needs a model on a mesh builds a `Program`, which allocates and compiles nothing.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.data.batches import Batch, BatchSpec, DatasetConfig
from t5x_gpu.data.data_module import spec_for
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.model import (
  DeviceBatch,
  Model,
  check_model,
  config_of,
  fp8_scaling_of,
  is_layered,
  owner_of_loss,
)
from t5x_gpu.models.precision import check_devices, check_mesh
from t5x_gpu.models.remat import REPEATS_MATMULS
from t5x_gpu.models.transformer import check_attention
from t5x_gpu.partitioning.axis_rules import Table, split_names
from t5x_gpu.partitioning.layout import Layout, OnMesh
from t5x_gpu.partitioning.trees import Params, Shapes, Tree, TreeFn
from t5x_gpu.runtime.topology import Device, Topology
from t5x_gpu.runtime.xla import flags
from t5x_gpu.terminal.console import show
from t5x_gpu.training.optimizers import check_optimizer, check_state_names
from t5x_gpu.training.schedules import replica_factor
from t5x_gpu.training.state import (
  RunForm,
  Trained,
  TrainState,
  history_of,
  new_state,
  state_names,
  trained_of,
)
from t5x_gpu.training.train_step import (
  StepConfig,
  StepFn,
  check_microbatches,
  check_normalizer,
  make_eval_step,
  make_train_step,
)

_log = logging.getLogger(__name__)


def check_whole_batch(model: Model, *, num_microbatches: int, is_pipeline: bool) -> None:
  """Raises ConfigError for microbatches if the loss of a row depends on the other rows."""
  if model.couples_rows and (num_microbatches > 1 or is_pipeline):
    raise ConfigError(
      'The loss of embeddings takes its negatives from the whole batch, so '
      + ('a pipeline' if is_pipeline else f'num_microbatches = {num_microbatches}')
      + ' cannot split the batch.',
      fix='Set train.num_microbatches = 1 and use no pipeline stages; split the batch over more '
      'devices, or set TransformerConfig.remat_policy to save memory.',
      parameters=('train.num_microbatches', 'Partitioner.stage'),
    )


@dataclasses.dataclass(frozen=True)
class Program:
  """A model on a mesh.

  Attributes:
    config: settings of the step.
    layout: mesh and rules.
    spec: the global batch of the data.
    names: TrainState of AxisNames.
    abstract_state: TrainState of shapes and shardings as the run stores it between steps.
    abstract_saved: the shapes and shardings in a checkpoint, without padding; the restore target.
    init: () -> TrainState on the mesh, as the run stores it; the same values on any topology.
    train_step: (state, batch) -> (state, sums); donates the old state.
    eval_step: (params, batch) -> sums; takes batches of any size.
  """

  config: StepConfig
  layout: Layout
  spec: BatchSpec
  names: TrainState
  abstract_state: TrainState
  abstract_saved: TrainState
  init: OnMesh
  train_step: OnMesh
  eval_step: OnMesh

  def in_saved_form(self, state: TrainState) -> TrainState:
    """Returns `state` as checkpoints have it: layers in the model's order, without padding.

    The gradient norms of earlier steps are left out: they are in the manifest.
    """
    form = RunForm(self.layout, self.names)

    def saved(state: TrainState) -> TrainState:
      return self.layout.in_model_order(form.unpadded(state), self.names)

    return self._converted(state.replace(grad_norms=None), saved, self.abstract_saved)

  def in_run_form(self, state: TrainState) -> TrainState:
    """Returns the `state` of a checkpoint in `RunForm`: layers in the pipeline's order, padded."""
    form = RunForm(self.layout, self.names)

    def stored(state: TrainState) -> TrainState:
      return form.padded(self.layout.in_run_order(state, self.names))

    like = self.abstract_state.replace(grad_norms=None)
    return self.with_grad_norms(self._converted(state, stored, like), ())

  def with_grad_norms(self, state: TrainState, values: Sequence[float]) -> TrainState:
    """Returns `state` with these gradient norms of earlier steps, if the run needs them."""
    return state.replace(grad_norms=self.config.spike_cfg.norms_on(self.layout.replicated, values))

  def params_in_run_form(self, params: Params) -> Params:
    """Returns the parameters of a checkpoint as in `in_run_form`."""
    layout, names = self.layout, self.names.params

    def stored(params: Params) -> Params:
      return layout.padded(layout.in_run_order(params, names), names, layout.rules.parameters)

    return self._converted(params, stored, self.abstract_state.params)

  def _converted(self, tree: Tree, convert: TreeFn, like: Shapes) -> Tree:
    if not (self.layout.reorders_layers or self.is_padded):
      return tree
    shardings = jax.tree.map(lambda a: a.sharding, like)
    return OnMesh(self.layout.mesh, jax.jit(convert, out_shardings=shardings))(tree)

  @property
  def is_padded(self) -> bool:
    """Whether the run stores arrays with padding (partitioning/fsdp.py)."""
    return any(
      a.shape != b.shape
      for a, b in zip(
        jax.tree.leaves(self.abstract_state.replace(grad_norms=None)),
        jax.tree.leaves(self.abstract_saved),
      )
    )

  @property
  def learning_rate_factor(self) -> float:
    """Scale of the schedule due to the number of replicas."""
    return replica_factor(self.config.learning_rate_scaling, self.layout.batch_parts)

  @property
  def trained(self) -> Trained:
    """Which parameters the step changes."""
    return trained_of(self.config.model)

  @property
  def num_params(self) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(self.abstract_saved.params))

  @property
  def num_trained(self) -> int:
    trained, _ = self.trained.split(self.abstract_saved.params)
    return sum(math.prod(p.shape) for p in jax.tree.leaves(trained))

  @property
  def step_spec(self) -> BatchSpec:
    """The batch that a step computes: `spec`, and rows of weight 0 if the layout fills it."""
    return _filled(self.spec, self.layout, self.config)

  @property
  def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self.abstract_of(self.step_spec)

  def abstract_of(self, spec: BatchSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and shardings of a batch on the mesh."""
    shardings = self.layout.batch_shardings(spec.shapes)
    return {
      name: jax.ShapeDtypeStruct(shape, spec.dtypes[name], sharding=shardings[name])
      for name, shape in spec.shapes.items()
    }

  def put_batch(self, batch: Batch) -> DeviceBatch:
    """Returns a training batch on the devices, filled as `step_spec`."""
    return self.layout.put_batch(batch, num_microbatches=self.config.num_microbatches)


def build_program(
  config: StepConfig,
  *,
  topology: Topology,
  devices: list[Device],
  dataset: Optional[DatasetConfig] = None,
  params: Optional[Callable[[StepConfig], Shapes]] = None,
) -> Program:
  """Returns the program of a run, after checking that model, batch and mesh fit each other.

  Args:
    config: the run's configuration.
    topology, devices: hosts and devices of the mesh.
    dataset: sets the shapes of the batch; None for the training data.
    params: `initial_params`, or a function that remembers its results, which take most of the time;
      None if `dataset` is given.
  Raises:
    ModelError, MeshError, ConfigError, ShapeError: before anything compiles.
  """
  model, dataset = config.model, dataset or config.train_dataset_cfg
  check_model(model)
  check_optimizer(config.optimizer)
  check_devices(fp8_scaling_of(model), devices)
  spec = spec_for(model, dataset)
  check_microbatches(dataset.batch_size, config.num_microbatches)
  check_normalizer(config, spec)
  layout = _lay_out(config, spec, topology, devices)
  check_mesh(fp8_scaling_of(model), layout.mesh.shape['model'])
  region = layout.region
  context = region.rules.context_method if 'context' in region.axes else None
  check_attention(config_of(model), devices[0], context=context)
  init, shapes, form = _first_state(config, spec, layout, params and params(config))
  abstract = form.abstract(shapes)
  functions = dict(
    init=lambda: form.first(init()),
    train_step=make_train_step(config, form, spec),
    eval_step=make_eval_step(config, form),
  )
  layout = form.with_costs(shapes)
  layout = dataclasses.replace(
    layout,
    notes=(*layout.notes, *_notes_on_settings(config, layout, _filled(spec, layout, config))),
  )
  return Program(
    config,
    layout,
    spec,
    form.names,
    abstract,
    form.abstract_saved(shapes),
    **_jitted(layout, _filled(spec, layout, config), abstract, **functions),
  )


# Setting of Partitioner -> the mesh axis that it needs.
_NEEDED_AXES = {
  'zero_stage': 'fsdp',
  'sequence_parallel': 'model',
  'context_attention': 'context',
  'pipeline_schedule': 'stage',
  'num_pipeline_microbatches': 'stage',
  'pipeline_repeats': 'stage',
}
# Setting of TransformerConfig -> the setting that it needs.
_NEEDED_SETTINGS = {
  'num_experts_per_token': 'num_experts',
  'expert_capacity_factor': 'num_experts',
  'normalize_gates': 'num_experts',
  'router_balance_loss': 'num_experts',
  'router_z_loss': 'num_experts',
  'qk_norm_kind': 'qk_norm',
}


# With so many tokens of a microbatch on a device, steps by microbatch took up to 20% less time than
# by layer; with 2,048, from 10% less to 16% more (docs/decisions.md).
_TOKENS_BY_MICROBATCH = 4096


def _notes_on_settings(config: StepConfig, layout: Layout, spec: BatchSpec) -> Iterator[str]:
  """Yields notes on settings that another setting makes void or costly."""
  partitioner, of_model = config.partitioner, config_of(config.model)
  if layout.mesh.size > 1:  # a single device has no layout, so notes on it would be noise
    for setting, axis in _changed(partitioner, _NEEDED_AXES):
      if layout.mesh.shape[axis] == 1:
        yield f'{setting} has no effect: the mesh has one device along {axis}'
  if partitioner.overlap_layers and layout.region.by_layer(config.num_microbatches):
    yield (
      "Partitioner.overlap_layers = True has no effect: with accumulate_by = 'layer', collectives "
      'of a layer run while its own first microbatch computes'
    )
  elif partitioner.overlap_layers and layout.pipeline and layout.pipeline.num_blocks > 1:
    yield (
      'Partitioner.overlap_layers = True has no effect: a stage has '
      f'{layout.pipeline.num_blocks} blocks of layers, and only one of them is in the last tick'
    )
  elif partitioner.overlap_layers and not is_layered(config.model):
    yield (
      'Partitioner.overlap_layers = True has no effect: '
      f'{owner_of_loss(config.model) or type(config.model).__name__} has a loss that is not in '
      'three parts, and may run a layer several times'
    )
  if of_model is not None:
    for setting, needed in _changed(of_model, _NEEDED_SETTINGS):
      if not getattr(of_model, needed):
        yield f'{setting} has no effect: {needed} = {getattr(of_model, needed)}'
    yield from _notes_on_remat(of_model, layout, config.num_microbatches, spec)


def _changed(settings: Any, names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
  """Yields ('Partitioner.NAME = VALUE', `names[NAME]`) of values that are not the defaults."""
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    if field.name in names and value != field.default:
      yield f'{type(settings).__name__}.{field.name} = {value!r}', names[field.name]


def _notes_on_remat(
  of_model: TransformerConfig, layout: Layout, num_microbatches: int, spec: BatchSpec
) -> Iterator[str]:
  policy, by_layer = of_model.remat_policy, layout.region.by_layer(num_microbatches)
  if of_model.full_remat_layers and (by_layer or policy == 'full'):
    reason = "Partitioner.accumulate_by = 'layer'" if by_layer else "remat_policy = 'full'"
    yield (
      f'TransformerConfig.full_remat_layers = {of_model.full_remat_layers} has no effect: {reason} '
      'has the same policy for all layers'
    )
  setting = f'TransformerConfig.remat_policy = {policy!r}'
  if layout.pipeline is not None and policy in REPEATS_MATMULS:
    yield (
      f'{setting} computes each layer twice in the backward pass: a pipeline computes a stage '
      "again in any case; 'minimal' keeps the activations of one microbatch instead"
    )
  if by_layer and policy not in REPEATS_MATMULS:
    note = (
      f"{setting} has no effect: Partitioner.accumulate_by = 'layer' computes each layer again in "
      'the backward pass'
    )
    lengths = [shape[1] for shape in spec.shapes.values() if len(shape) > 1]
    parts = layout.batch_parts * layout.mesh.shape['context'] * num_microbatches
    tokens = spec.batch_size * min(lengths, default=1) // parts  # of the shorter stack
    if tokens >= _TOKENS_BY_MICROBATCH and not layout.sizes.crosses_hosts('fsdp'):
      note += (
        f"; with {tokens:,} tokens per microbatch and device, 'microbatch' is faster for most "
        'models, if it fits: python -m t5x_gpu.plan compares them'
      )
    yield note


def host_counts(program: Program) -> tuple[int, ...]:
  """Returns the numbers of hosts, up to the present one, on which the run could continue.

  See `Partitioner.on_fewer_hosts`. Memory is not checked.
  """
  config, topology = program.config, program.layout.topology
  partitioner = config.partitioner.on_fewer_hosts()

  def fits(num_hosts: int) -> bool:
    part = dataclasses.replace(topology, num_hosts=num_hosts)
    return all(
      partitioner.fits(part, logical_sizes=sizes, num_microbatches=config.num_microbatches)
      for sizes in _logical_sizes(config.model, program.spec)
    )

  return (*filter(fits, range(1, topology.num_hosts)), topology.num_hosts)


def initial_params(config: StepConfig) -> Shapes:
  """Returns the shapes and axes of a run's parameters, which no layout changes."""
  spec = spec_for(config.model, config.train_dataset_cfg)
  return jax.eval_shape(functools.partial(_init_boxed, config, spec))


def _init_boxed(config: StepConfig, spec: BatchSpec) -> Params:
  return config.model.init(jax.random.key(config.random_seed), spec)


def _filled(spec: BatchSpec, layout: Layout, config: StepConfig) -> BatchSpec:
  """Returns `spec` with the rows of weight 0 that fill a training batch."""
  rows = layout.filled_rows(spec.batch_size, num_microbatches=config.num_microbatches)
  return spec.with_rows(rows)


def _first_state(
  config: StepConfig, spec: BatchSpec, layout: Layout, params: Optional[Shapes]
) -> tuple[Callable[[], TrainState], TrainState, RunForm]:
  """Returns (a function that makes the first state, its shapes, its form)."""
  model, optimizer = config.model, config.optimizer
  init_boxed = functools.partial(_init_boxed, config, spec)
  boxed = jax.eval_shape(init_boxed) if params is None else params
  abstract_params, names = split_names(boxed)
  names = layout.chosen(names, abstract_params)

  def of_params(params: Params) -> TrainState:
    return new_state(layout.in_run_order(params, names), optimizer, names, **options)

  def init() -> TrainState:
    params, _ = split_names(init_boxed())
    return of_params(params)

  options = dict(trained=trained_of(model), history=history_of(model))
  of_state = state_names(abstract_params, optimizer, names, **options)
  shapes = jax.eval_shape(of_params, abstract_params)
  check_state_names(optimizer, of_state.opt_state, shapes.opt_state)
  return init, shapes, RunForm(layout, layout.chosen(of_state, shapes), config.spike_cfg)


def _jitted(
  layout: Layout,
  spec: BatchSpec,
  abstract: TrainState,
  *,
  init: Callable[[], TrainState],
  train_step: StepFn,
  eval_step: TreeFn,
) -> dict[str, OnMesh]:
  shardings = jax.tree.map(lambda a: a.sharding, abstract)
  return {
    # Without rules: the forward pass of an initialization is never computed.
    'init': OnMesh(layout.mesh, jax.jit(init, out_shardings=shardings)),
    'train_step': layout.jit(
      train_step,
      in_shardings=(shardings, layout.batch_shardings(spec.shapes)),
      donate_argnums=0,
      out_shardings=(shardings, layout.replicated),
    ),
    'eval_step': layout.jit(
      eval_step,
      out_shardings=layout.replicated,
      in_shardings=(shardings.params, None),  # batches of any size
    ),
  }


def _lay_out(
  config: StepConfig, spec: BatchSpec, topology: Topology, devices: list[Device]
) -> Layout:
  """Returns the layout."""
  model, num_microbatches = config.model, config.num_microbatches
  layouts = [
    config.partitioner.lay_out(
      topology, devices, num_microbatches=num_microbatches, logical_sizes=sizes
    )
    for sizes in _logical_sizes(model, spec)
  ]
  is_pipeline = layouts[0].pipeline is not None
  check_whole_batch(model, num_microbatches=num_microbatches, is_pipeline=is_pipeline)
  return layouts[0]


def _logical_sizes(model: Model, spec: BatchSpec) -> list[dict[str, int]]:
  """Returns array axis -> size for each length of rows.

  Rows of an encoder and a decoder may differ in length; both must fit.
  """
  lengths = dict.fromkeys(shape[1] for shape in spec.shapes.values() if len(shape) > 1)
  sizes = {**model.logical_sizes(), 'stacks': len(model.stacks), 'batch': spec.batch_size}
  return [{**sizes, 'length': length} for length in lengths]


def compile_options(program: Program, xla: Optional[flags.Applied]) -> Optional[dict[str, Any]]:
  """Returns the compiler options of a preset for this program; None for XLA's defaults.

  XLA combines collectives up to the size of one layer's weights in the compute dtype.
  """
  if xla is None:
    return None
  mesh = program.layout.mesh
  applied = flags.refine(
    xla,
    mesh_axes=[a for a, size in mesh.shape.items() if size > 1],
    layer_bytes=layer_bytes(program) or None,
    num_gpus=mesh.size,
    layers_ahead=program.layout.region.layers_ahead,
    by_layer=program.layout.region.by_layer(program.config.num_microbatches),
  )
  return dict(applied.compile_options) or None


def layer_bytes(program: Program) -> int:
  """Returns the bytes of one layer's weights, whole and in bfloat16; 0 without layers."""
  params = jax.tree.leaves(program.abstract_state.params)
  names = jax.tree.leaves(program.names.params)
  return sum(
    2 * math.prod(p.shape) // p.shape[n.names.index('layers')]
    for p, n in zip(params, names)
    if 'layers' in n.names
  )


def bytes_per_device(tree: Tree) -> int:
  """Returns the bytes that the arrays of an abstract, sharded tree take on one device."""
  return sum(
    math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
  )


def gradient_bytes(program: Program, table: Table) -> int:
  """Returns the bytes that the gradients of a step take on one device, split by `table`."""
  trained, names = (
    program.trained.split(tree)[0] for tree in (program.abstract_saved.params, program.names.params)
  )
  return bytes_per_device(program.layout.stored(trained, names, table))


def size_line(program: Program) -> str:
  """Returns `134,307,072 parameters; 1.50 GiB of parameters and optimizer state per device`.

  If only some parameters are trained, it includes their number.
  """
  size = show(bytes_per_device(program.abstract_state))
  trained = (
    ''
    if program.num_trained == program.num_params
    else f', {program.num_trained:,} of them trained'
  )
  return (
    f'{program.num_params:,} parameters{trained}; {size} of parameters and optimizer state '
    'per device'
  )
