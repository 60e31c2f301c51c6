"""Eight fake CPU devices for every test, chosen before jax starts a backend."""

import os

os.environ['JAX_PLATFORMS'] = os.environ.get('T5X_GPU_TEST_PLATFORM', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
