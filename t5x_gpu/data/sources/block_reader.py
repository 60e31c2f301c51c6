"""The former place of `BlockReader`, which data modules of users import from here."""

from t5x_gpu.data.sources.readers import BlockReader

__all__ = ['BlockReader']
