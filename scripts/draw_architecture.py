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
WIDTH, BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT = 960, 190, 52, 96
STYLE = (
  'text{font-family:sans-serif;fill:#222}.name{font-size:15px;font-weight:bold}'
  '.rooms{font-size:10px;fill:#555}rect{fill:#eef4fb;stroke:#4477aa}'
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
  """Returns folder -> its floor: one above the highest folder that it imports."""
  found: dict[str, int] = {}

  def floor(folder: str) -> int:
    if folder not in found:
      found[folder] = 1 + max((floor(below) for below in graph[folder]), default=-1)
    return found[folder]

  for folder in sorted(graph):
    floor(folder)
  return found


def rooms(folder: str) -> str:
  """Returns the names of the folders inside a folder."""
  inner = sorted(p.parent.name for p in (PACKAGE / folder).glob('*/__init__.py'))
  return ', '.join(inner)


def svg(graph: Mapping[str, set[str]]) -> str:
  """Returns the picture."""
  level = floors(graph)
  top = max(level.values())
  centre: dict[str, tuple[int, int]] = {}
  for floor in range(top + 1):
    row = sorted(folder for folder in graph if level[folder] == floor)
    for i, folder in enumerate(row):
      shift = (-1) ** floor * 24 if len(row) == 1 else 0  # arrows that pass a floor stay visible
      centre[folder] = (
        round(WIDTH * (i + 1) / (len(row) + 1)) + shift * 4,
        (top - floor) * ROW_HEIGHT + ROW_HEIGHT // 2,
      )
  lines = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {(top + 1) * ROW_HEIGHT}">',
    f'<style>{STYLE}</style>',
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto"><path d="M0 0 8 4 0 8"/></marker></defs>',
  ]
  for folder, below in sorted(without_shortcuts(graph).items()):
    for other in sorted(below):
      (x, y), (to_x, to_y) = centre[folder], centre[other]
      y, to_y = y + BOX_HEIGHT // 2, to_y - BOX_HEIGHT // 2
      lines.append(
        f'<path marker-end="url(#tip)" d="M{x} {y}C{x} {(y + to_y) // 2} {to_x} '
        f'{(y + to_y) // 2} {to_x} {to_y}"/>'
      )
  for folder, (x, y) in sorted(centre.items()):
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
