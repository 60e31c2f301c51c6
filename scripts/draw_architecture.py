"""Draws docs/images/architecture.svg: the folders of the package and who imports whom.

    python scripts/draw_architecture.py [OUTPUT]

The picture follows from the import statements. A folder stands above all folders that it imports.
An arrow that follows from two others is left out. A test checks that the committed file is current.
"""

import ast
import pathlib
import sys
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / 't5x_gpu'
PICTURE = ROOT / 'docs' / 'images' / 'architecture.svg'
COMMANDS = 'commands'
# Horizontal places next to the middle column, so that long arrows do not cross boxes.
COLUMNS = {'reporting': 140, 'compiled': 790, 'metrics': 250, 'data': 790, 'terminal': 790}
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT = 960, 212, 52, 92
STYLE = (
  'text{font-family:sans-serif;fill:#222}.name{font-size:15px;font-weight:bold}'
  '.rooms{font-size:9px;fill:#555}rect{fill:#eef4fb;stroke:#4477aa}'
  'path{fill:none;stroke:#99a;stroke-width:1.2}'
)

Graph = dict[str, set[str]]


def folder_of(path: pathlib.Path) -> str:
  """Returns the folder of a module, `COMMANDS` for the modules that are run."""
  parts = path.relative_to(PACKAGE).parts
  if path.name == '__main__.py' or len(parts) == 1 and parts[0] != 'errors.py':
    return COMMANDS
  return parts[0].removesuffix('.py')


def imported_modules(path: pathlib.Path) -> list[pathlib.Path]:
  """Returns the files of the package that a file imports when it is imported itself."""
  names = []
  tree = ast.parse(path.read_text(encoding='utf-8'))
  tree.body = [node for node in tree.body if not isinstance(node, ast.If)]  # `__main__`
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names += [f'{node.module}.{alias.name}' for alias in node.names] + [node.module]
  files = [ROOT / f'{name.replace(".", "/")}.py' for name in names if name.startswith('t5x_gpu.')]
  return [file for file in files if file.is_file()]


def folder_imports() -> Graph:
  """Returns folder -> the other folders that it imports."""
  graph: Graph = {}
  for path in sorted(PACKAGE.rglob('*.py')):
    if path.name == '__init__.py':
      continue
    imported = {folder_of(file) for file in imported_modules(path)}
    graph.setdefault(folder_of(path), set()).update(imported - {folder_of(path)})
  return graph


def reachable(graph: Mapping[str, set[str]], folder: str) -> set[str]:
  """Returns all folders that `folder` imports, directly or through others."""
  found = set(graph[folder])
  return found.union(*(reachable(graph, below) for below in graph[folder]))


def without_shortcuts(graph: Mapping[str, set[str]]) -> Graph:
  """Returns the graph without the arrows that follow from two others."""
  return {
    folder: below - {far for near in below for far in reachable(graph, near)}
    for folder, below in graph.items()
  }


def floors(graph: Mapping[str, set[str]]) -> dict[str, int]:
  """Returns folder -> its floor, above all folders that it imports."""
  found: dict[str, int] = {}

  def floor(folder: str) -> int:
    if folder not in found:
      found[folder] = 1 + max((floor(below) for below in graph[folder]), default=-1)
    return found[folder]

  for folder in sorted(graph):
    floor(folder)
  for folder in graph:
    if not graph[folder]:  # right below its users: a shorter arrow
      found[folder] = min((found[f] for f in graph if folder in graph[f]), default=1) - 1
  return found


def rooms(folder: str) -> str:
  """Returns the names of the folders inside a folder."""
  inner = sorted(p.parent.name for p in (PACKAGE / folder).glob('*/__init__.py'))
  return ', '.join(inner)


def svg(graph: Mapping[str, set[str]]) -> str:
  """Returns the picture."""
  level = floors(graph)
  top = max(level.values())
  center: dict[str, tuple[int, int]] = {}
  for folder, floor in level.items():
    row = sorted(f for f in graph if level[f] == floor and f not in COLUMNS)
    middle = WIDTH // 2 + (0 if folder in COLUMNS else row.index(folder)) * (BOX_WIDTH + 20)
    y = (top - floor) * ROW_HEIGHT + ROW_HEIGHT // 2
    center[folder] = (COLUMNS.get(folder, middle), y)
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {(top + 1) * ROW_HEIGHT}">',
    f'<style>{STYLE}</style>',
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0 8 4 0 8"/></marker></defs>',
  ]
  for folder, below in sorted(without_shortcuts(graph).items()):
    for other in sorted(below):
      (x, y), (to_x, to_y) = center[folder], center[other]
      to_y -= BOX_HEIGHT // 2
      if level[folder] - level[other] > 1 and x != to_x:  # beyond the next floor: leave sideways
        x += BOX_WIDTH // 2 * (1 if to_x > x else -1)
        curve = f'C{to_x} {y} {to_x} {y} {to_x} {to_y}'
      else:
        y += BOX_HEIGHT // 2
        curve = f'C{x} {(y + to_y) // 2} {to_x} {(y + to_y) // 2} {to_x} {to_y}'
      lines.append(f'<path marker-end="url(#tip)" d="M{x} {y}{curve}"/>')
  for folder, (x, y) in sorted(center.items()):
    inner = 'train, eval, infer, plan, ...' if folder == COMMANDS else rooms(folder)
    lines += [
      f'<rect x="{x - BOX_WIDTH // 2}" y="{y - BOX_HEIGHT // 2}" width="{BOX_WIDTH}" '
      f'height="{BOX_HEIGHT}" rx="6"/>',
      f'<text class="name" text-anchor="middle" x="{x}" y="{y - 3}">{folder}</text>',
      f'<text class="rooms" text-anchor="middle" x="{x}" y="{y + 14}">{inner}</text>',
    ]
  return '\n'.join([*lines, '</svg>', ''])


def main() -> None:
  """Writes the picture to the file that the command line names, else to `PICTURE`."""
  path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
  path.write_text(svg(folder_imports()), encoding='utf-8')


if __name__ == '__main__':
  main()
