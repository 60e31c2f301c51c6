"""`python -m t5x_gpu.data`: see t5x_gpu/data_tools.py."""

from t5x_gpu import cli, data_tools

cli.run_main(data_tools.main)
