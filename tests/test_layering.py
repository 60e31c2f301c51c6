"""The import order of the package, and a core that needs no TensorFlow."""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.helpers_xla import xla_flags

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 't5x_gpu'

# A file imports from its own folder and from those before it. Entry points lie outside of it: they
# import everything, nothing imports them.
ORDER = (
  'errors',
  'terminal',
  'storage',
  'config',
  'runtime',
  'partitioning',
  'data',
  'layers',
  'models',
  'training',
  'metrics',
  'checkpoint',
  'conversion',
  'evaluation',
  'compiled',
  'reporting',
  'run',
  'tools',
)
NOT_EVEN_ABOVE = {('partitioning', 'config')}
SHARED_BY_ENTRY_POINTS = 't5x_gpu.cli'

TENSORFLOW = {'tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio', 't5', 't5x'}
# In data/, but the trainer needs them where there is no TensorFlow. All of data/prepared/ is, too.
WITHOUT_TENSORFLOW = {
  f't5x_gpu.data.{name}'
  for name in ('batches', 'data_module', 'features', 'synthetic', 'same_data')
}
JAX = {'jax', 'jaxlib', 'flax', 'optax', 'orbax'}


@functools.cache
def modules() -> dict[str, ast.Module]:
  """Returns the syntax trees of the package's files by module name."""
  names = {
    path: '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
    for path in sorted(PACKAGE.rglob('*.py'))
  }
  trees = {
    name: ast.parse(path.read_text(encoding='utf-8'), str(path)) for path, name in names.items()
  }
  for tree in trees.values():  # `if __name__ == '__main__'` may import the file by its own name.
    tree.body = [
      node
      for node in tree.body
      if not (isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'")
    ]
  return trees


def path_of(module: str) -> pathlib.Path:
  path = ROOT / module.replace('.', '/')
  file = path.with_suffix('.py')  # a folder of this name may hold old bytecode
  return file if file.is_file() else path / '__init__.py'


def imports_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
  """Yields (imported module, line); literal importlib.import_module calls count."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'relative import in line {node.lineno}'
      for alias in node.names:
        inner = f'{node.module}.{alias.name}'
        yield (inner if inner in modules() else node.module), node.lineno
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module'):
      for argument in node.args[:1]:
        if isinstance(argument, ast.Constant):
          yield argument.value, node.lineno


@functools.cache
def imported_by(module: str) -> dict[str, int]:
  """Returns what the file of `module` imports -> the line."""
  return dict(imports_in(modules()[module]))


def own(module: str) -> list[str]:
  return [name for name in imported_by(module) if name in modules()]


def reached_from(module: str) -> set[str]:
  """Returns the own modules that importing `module` imports, itself included."""
  found, todo = set(), [module]
  while todo:
    name = todo.pop()
    if name not in found:
      found.add(name)
      todo += own(name)
  return found


def top_level(name: str) -> str:
  return name.split('.', 1)[0]


def layer(module: str) -> str:
  """Returns 'data' for t5x_gpu.data.batches; for a file in the root its own name."""
  return module.split('.')[1] if '.' in module else ''


def is_entry_point(module: str) -> bool:
  is_root = (
    module.count('.') == 1
    and layer(module) not in ORDER
    and path_of(module).name != ('__init__.py')
  )
  return is_root or module.endswith('.__main__')


def may_use_tensorflow(module: str) -> bool:
  return (
    layer(module) == 'data'
    and module not in WITHOUT_TENSORFLOW
    and not module.startswith('t5x_gpu.data.prepared.')
  )


def where(module: str, imported: str) -> str:
  return f'{path_of(module).relative_to(ROOT)}:{imported_by(module)[imported]} imports {imported}'


def may_import(module: str, imported: str) -> bool:
  """Returns whether the order allows it."""
  if module == 't5x_gpu':
    return imported == 't5x_gpu.runtime.import_interrupts'
  if is_entry_point(module):
    return (
      not is_entry_point(imported)
      or imported == SHARED_BY_ENTRY_POINTS
      or (module.endswith('.__main__'))
    )
  if is_entry_point(imported) or (layer(module), layer(imported)) in NOT_EVEN_ABOVE:
    return False
  return ORDER.index(layer(imported)) <= ORDER.index(layer(module))


def none(found: list[str]) -> None:
  if found:
    pytest.fail('\n'.join(found), pytrace=False)


def test_every_folder_has_a_place_in_the_order():
  folders = {p.parent.name for p in PACKAGE.glob('*/__init__.py')}
  assert folders - set(ORDER) == set()


def test_files_import_only_from_their_own_folder_and_those_above():
  none([where(m, i) for m in modules() for i in own(m) if not may_import(m, i)])


def test_training_reaches_no_tool():
  found = reached_from('t5x_gpu.train') & {m for m in modules() if layer(m) == 'tools'}
  assert found == set()


def test_imports_have_no_cycles():
  list(graphlib.TopologicalSorter({m: own(m) for m in modules()}).static_order())


def test_own_modules_are_not_imported_inside_functions():
  found = [
    f'{path_of(name).relative_to(ROOT)}:{line} imports {imported} in {function.name}'
    for name, tree in modules().items()
    if not name.endswith('.__main__')
    for function in ast.walk(tree)
    if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    for imported, line in imports_in(function)
    if top_level(imported) == 't5x_gpu'
  ]
  none(found)


def test_imports_are_used():
  found = []
  for name, tree in modules().items():
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in tree.body:
      if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '__all__':
        used |= set(ast.literal_eval(node.value))
    for node in ast.walk(tree):
      if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
          bound = alias.asname or alias.name.split('.', 1)[0]
          if bound not in used:
            found.append(f'{path_of(name).relative_to(ROOT)}:{node.lineno} imports {bound}')
  none(found)


# Folders of tests about the whole product.
WITHOUT_TWIN = {'aot', 'cluster', 'golden', 'gpu', 'parity', 'property', 'worlds'}


def test_the_folders_of_tests_mirror_those_of_the_package():
  twins = {path_of(m).parent.relative_to(PACKAGE) for m in modules()}
  tests = {path.parent.relative_to(ROOT / 'tests') for path in ROOT.glob('tests/**/test_*.py')}
  none([f't5x_gpu/{folder} has no tests/{folder}/test_*.py' for folder in sorted(twins - tests)])
  extra = {folder for folder in tests - twins if folder.parts[0] not in WITHOUT_TWIN}
  none([f'tests/{folder} mirrors no t5x_gpu/{folder}' for folder in sorted(extra)])


def test_init_files_are_empty():
  # The package's __init__ is its first file to run: it handles Ctrl-C during the imports.
  assert [p for p in PACKAGE.rglob('__init__.py') if p.read_text().strip()] == [
    PACKAGE / '__init__.py'
  ]


def test_only_data_imports_tensorflow():
  found = [
    where(m, i)
    for m in modules()
    for i in imported_by(m)
    if top_level(i) in TENSORFLOW and not may_use_tensorflow(m)
  ]
  none(found)


def test_nothing_outside_data_reaches_tensorflow_through_data():
  found = {}
  for m in modules():
    if not may_use_tensorflow(m):
      through = {r for r in reached_from(m) if TENSORFLOW & set(map(top_level, imported_by(r)))}
      if through:
        found[m] = through
  assert found == {}


def test_config_and_xla_flags_do_not_import_jax():
  # They run before a backend may be chosen, and answer in a fraction of a second.
  for m in modules():
    if layer(m) == 'config' or m in ('t5x_gpu.cli', 't5x_gpu.runtime.xla.flags'):
      for r in reached_from(m):
        assert [where(r, i) for i in imported_by(r) if top_level(i) in JAX] == [], m


# Commands on the files of a run, and what they must not import: a model costs half a second of CPU
# time, on a loaded login node several seconds.
ON_FILES = ('top', 'report', 'checkpoint_tools')
A_MODEL = {'layers', 'models', 'training', 'flax', 'optax', 'tokamax'}
READS_TABLES = {'pyarrow'}


@pytest.mark.parametrize(
  ('command', 'heavy'),
  [*((command, A_MODEL | READS_TABLES) for command in ON_FILES), ('cli', READS_TABLES | JAX)],
)
def test_commands_import_no_more_than_they_use(command, heavy):
  found = []
  for module in reached_from(f't5x_gpu.{command}'):
    for imported in imported_by(module):
      name = layer(imported) if imported in modules() else top_level(imported)
      found += [where(module, imported)] if name in heavy else []
  none(found)


def test_the_gpu_benchmark_runs_where_orbax_is_not_installed():
  files = (ROOT / 'benchmarks' / 'gpu').glob('*.py')
  trees = [ast.parse(path.read_text(encoding='utf-8')) for path in files]
  imported = {name for tree in trees for name, _ in imports_in(tree)} & set(modules())
  reached = set().union(*map(reached_from, imported))
  none([where(m, i) for m in reached for i in imported_by(m) if top_level(i) == 'orbax'])


# How layers and models touch sharding: module of partitioning/ -> names; None for all of it.
FOR_LAYERS = {
  'axis_rules': {
    'NamedParam',
    'gather_over',
    'is_named',
    'local_ways',
    'shard',
    'split_ways',
    'sum_over',
    'with_axes',
  },
  'parameters': {'whole'},
  'layer_stacks': None,  # where a model keeps its layers
}
# Where layers and parallelism meet: module -> names of partitioning/ that it imports, too.
MEETING_POINTS = {
  # Operands of a matmul vary over the same axes; each token uses its device's copy of a parameter.
  'layers.dense': {'axis_rules.splits_rows', 'axis_rules.varying'},
  # A kind of parameter: kernels that are gathered in 8 bits.
  'layers.fp8': {
    'axis_rules.varying',
    'parameters.Dims',
    'parameters.Parameter',
    'parameters.Split',
    'parameters.Wrapper',
    'parameters.as_parameter',
    'trees.DTypeLike',
    'trees.Tree',
  },
  # A kind of parameter: kernels that are multiplied in blocks.
  'layers.mxfp8': {
    'axis_rules.varying',
    'parameters.Parameter',
    'parameters.Split',
    'parameters.Wrapper',
    'parameters.as_parameter',
    'trees.DTypeLike',
    'trees.Tree',
  },
  # Looks rows up in a table whose rows or features are split.
  'layers.embedding': {
    'axis_rules.split_axes',
    'axis_rules.split_axis',
    'axis_rules.splits_rows',
    'parameters.Dims',
    'parameters.Split',
    'parameters.is_parameter',
  },
  # Expert parallelism, and kernels that the compiler cannot split.
  'layers.moe': {
    'axis_rules.is_manual',
    'context_parallel.length_order',
    'context_parallel.local_positions',
    'expert_parallel',
  },
  'layers.grouped_matmul': {'axis_rules.split_axis', 'axis_rules.unmarked', 'axis_rules.varying'},
  # Attention over a split length.
  'layers.positions': {'axis_rules.context_method', 'context_parallel.gather_info'},
  'layers.backends.choose': {'axis_rules.context_method'},
  'layers.backends.context': {
    'axis_rules.context_method',
    'context_parallel.gather_info',
    'context_parallel.gather_length',
    'context_parallel.in_position_order',
    'context_parallel.num_before',
    'ring_attention.MASKED',
    'ring_attention.RESULTS',
    'ring_attention.full_like',
    'ring_attention.per_row',
    'ring_attention.send_around',
    'ring_attention.visit_all',
  },
  'layers.backends.plain': {
    'axis_rules.context_method',
    'context_parallel.gathered_attention',
    'ring_attention.MASKED',
    'ring_attention.RESULTS',
    'ring_attention.largest_block',
    'ring_attention.ring_attention',
  },
  'layers.backends.tokamax': {'axis_rules.on_each_device', 'ring_attention.RESULTS'},
  # What the layers of a loop store, and the name of attention's results.
  'models.remat': {'parameters.Remat', 'ring_attention.RESULTS'},
  # Kernels that are converted before the loop over layers, or over a pipeline's ticks.
  'layers.rounded': {'axis_rules.varying', 'parameters.Split', 'parameters.Wrapper', 'trees.Tree'},
  'models.precision': {'parameters.Split', 'parameters.as_parameter', 'parameters.is_parameter'},
  # The loop over layers, and parameters that are used after it.
  'models.stack': {'overlap'},
  'models.transformer': {
    'parameters.adds_in_place',
    'parameters.num_layers',
    'parameters.over_layers',
  },
  # Sums over whole rows count on one device, and in a pipeline not at all.
  'models.losses': {'axis_rules.is_manual', 'axis_rules.varying'},
  'models.encoder': {'axis_rules.is_manual'},
  # They compile for a layout.
  'models.inference.classify': {'layout.Layout'},
  'models.inference.generation': {'layout.Layout'},
}


def sharding_imports(module: str) -> Iterator[tuple[str, str]]:
  """Yields (module of partitioning/, name) that a module imports; '' for the whole module."""
  for node in ast.walk(modules()[module]):
    if isinstance(node, ast.ImportFrom) and node.module == 't5x_gpu.partitioning':
      yield from ((alias.name, '') for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module.startswith('t5x_gpu.partitioning.'):
      yield from ((node.module.split('.')[2], alias.name) for alias in node.names)


def test_layers_and_models_touch_sharding_only_by_names():
  beyond = {}
  for module in modules():
    if layer(module) in ('layers', 'models'):
      for imported, name in sharding_imports(module):
        allowed = FOR_LAYERS.get(imported, set())
        if allowed is not None and name not in allowed:
          found = beyond.setdefault(module.removeprefix('t5x_gpu.'), set())
          found.add(f'{imported}.{name}' if name else imported)
  assert beyond == MEETING_POINTS


def test_only_model_dir_lists_steps_and_reads_manifests():
  # Everything else asks a ModelDir, which remembers the answer.
  askers = {'committed_steps', 'read_manifest', 'read_metadata'}
  found = [
    f'{path_of(name).relative_to(ROOT)}:{node.lineno} imports {alias.name}'
    for name, tree in modules().items()
    if name != 't5x_gpu.checkpoint.model_dir'
    for node in ast.walk(tree)
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
    if alias.name in askers
  ]
  none(found)


def test_only_config_and_entry_points_import_gin():
  found = [
    where(m, i)
    for m in modules()
    for i in imported_by(m)
    if top_level(i) == 'gin' and layer(m) != 'config' and not is_entry_point(m)
  ]
  none(found)


def test_lines_fit_and_public_functions_are_typed():
  found = []
  for name, tree in modules().items():
    path = path_of(name).relative_to(ROOT)
    text = (ROOT / path).read_text(encoding='utf-8').splitlines()
    found += [
      f'{path}:{i} has {len(line)} columns' for i, line in enumerate(text, 1) if len(line) > 100
    ]
    for node in [
      *tree.body,
      *(n for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body),
    ]:
      if isinstance(node, ast.FunctionDef) and not node.name.startswith('_'):
        untyped = [
          a.arg
          for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
          if a.annotation is None and a.arg not in ('self', 'cls')
        ]
        if untyped or (node.returns is None):
          found.append(f'{path}:{node.lineno} {node.name}: types are missing')
  none(found)


# What a machine with jax, flax, optax, orbax, numpy, absl and gin-config alone does not have.
BARE = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio', 'matplotlib',
             'tensorboardX', 'tensorboard', 'sentencepiece'):
  sys.modules[name] = None
from t5x_gpu import bench
code = bench.main(['--gin_file=gin_configs/examples/demo.gin', '--steps=2', '--warmup=1',
                   '--gin.TransformerConfig.num_layers=1', '--gin.TransformerConfig.scan_unroll=1',
                   '--gin.BATCH_SIZE=8', "--gin.TASK_FEATURE_LENGTHS={'targets': 32}"])
sys.exit(code)
"""


@pytest.mark.skipif(sys.platform == 'win32', reason='POSIX only')
@pytest.mark.slow
def test_bench_runs_without_tensorflow_seqio_matplotlib_and_tensorboardx(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', BARE],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=600,
    env={
      'PYTHONPATH': str(ROOT),
      'PATH': '/usr/bin:/bin',
      'JAX_PLATFORMS': 'cpu',
      'HOME': str(tmp_path),
      'XLA_FLAGS': xla_flags(),
    },
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'tokens/s' in done.stdout
