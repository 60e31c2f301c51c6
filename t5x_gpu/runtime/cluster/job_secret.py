"""A secret that only the processes of one job have, and proofs of having it.

It comes from the environment, which Linux shows only to the same user and to root. It is never
sent: each side signs the other's random challenge together with its message (HMAC-SHA256).
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping

VARIABLE = 'T5X_GPU_JOB_SECRET'
# On HPE Cray, Slurm's mpi/cray_shasta, PALS and Flux set the same random number for all tasks.
_OF_SCHEDULERS = ('PMI_SHARED_SECRET',)


def from_environment(env: Mapping[str, str]) -> str:
  """Returns the secret of this job, '' if it has none."""
  return next((env[name] for name in (VARIABLE, *_OF_SCHEDULERS) if env.get(name)), '')


def new() -> str:
  """Returns a secret or challenge of 256 random bits, as text."""
  return secrets.token_hex(32)


def proof(secret: str, *parts: str) -> str:
  """Returns a signature of `parts` that only a holder of `secret` can make; '' without a secret."""
  if not secret:
    return ''
  return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def proves(given: str, secret: str, *parts: str) -> bool:
  """Returns whether `given` is the signature of `parts`, in constant time."""
  return hmac.compare_digest(given.encode(), proof(secret, *parts).encode())
