"""`python -m t5x_gpu.config`: see t5x_gpu/config_tools.py."""

from t5x_gpu import cli, config_tools

cli.run_main(config_tools.main)
