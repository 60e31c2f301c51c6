"""Draws docs/images/mesh.png: which GPU holds which part, for three settings of two hosts.

    python scripts/draw_mesh.py [OUTPUT]

Color is the copy of the model that a GPU works for (its index on the data axis); the text is the
part of that copy that it holds (its indices on fsdp and model).
"""

import pathlib
import sys

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt
import numpy as np

from t5x_gpu.partitioning.mesh import device_array
from t5x_gpu.partitioning.mesh_sizes import MESH_AXES, resolve_mesh_sizes
from t5x_gpu.runtime.topology import Topology

TOPOLOGY = Topology(2, 8)
SETTINGS = {
  'num_partitions = 1': dict(num_partitions=1),
  'num_partitions = 4': dict(num_partitions=4),
  'fsdp = 4, num_partitions = 2': dict(fsdp=4, num_partitions=2),
}


def draw(axes: plt.Axes, title: str, **settings: int) -> None:
  """Draws one setting: a row of cells per host."""
  sizes = resolve_mesh_sizes(TOPOLOGY, **settings)
  numbers = device_array(sizes, TOPOLOGY, list(range(TOPOLOGY.num_devices)))
  colors = plt.get_cmap('tab20')
  for place, number in np.ndenumerate(numbers):
    at = dict(zip(MESH_AXES, place))
    host, gpu = divmod(int(number), TOPOLOGY.devices_per_host)
    axes.add_patch(plt.Rectangle((gpu, -1.5 * host), 0.92, 0.92, color=colors(at['data'] % 20)))
    axes.text(
      gpu + 0.46,
      -1.5 * host + 0.46,
      f'fsdp {at["fsdp"]}\nmodel {at["model"]}',
      fontsize=7,
      ha='center',
      va='center',
      color='white' if at['data'] % 2 == 0 else 'black',
    )
  for host in range(TOPOLOGY.num_hosts):
    axes.text(-0.2, -1.5 * host + 0.46, f'host {host}', ha='right', va='center', fontsize=9)
  axes.text(4, -0.29, 'network', ha='center', va='center', fontsize=8, color='0.4')
  total = sizes.total
  axes.set_title(
    f'{title}: copies: {total["data"]} (colors), parts of a copy: '
    f'{total["fsdp"]} (fsdp) x {total["model"]} (model)',
    fontsize=9,
    loc='left',
  )
  axes.set_xlim(-1.4, 8.1)
  axes.set_ylim(-1.6, 1.0)
  axes.set_aspect('equal')
  axes.axis('off')


def main() -> None:
  out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else 'docs/images/mesh.png')
  figure, rows = plt.subplots(len(SETTINGS), 1, figsize=(7.5, 7.2), layout='constrained')
  for axes, (title, settings) in zip(rows, SETTINGS.items()):
    draw(axes, title, **settings)
  out.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(out, dpi=110)


if __name__ == '__main__':
  main()
