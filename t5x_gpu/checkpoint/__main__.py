"""`python -m t5x_gpu.checkpoint`: see t5x_gpu/checkpoint_tools.py."""

from t5x_gpu import checkpoint_tools, cli

cli.run_main(checkpoint_tools.main)
