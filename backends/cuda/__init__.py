"""On NVIDIA GPUs through torch's own operators: native dtypes, accumulation in float32 (float64 beside float64).

Rules are device-agnostic torch, but for the few operators that CUDA has and a
CPU has not.  None waits for the device: no number is read back, and no shape
depends on one.  They create no stream and no event; they run on the stream
that is current (see `mla_fx.backends.torch_streams`).

What has been run: every rule on CPU tensors against the reference, every rule
on tensors without data, and the streams of programs on a stand-in for the
device module.  Nothing here has run on a GPU so far; the tests that need one
are skipped without it.
"""

if __name__ != "mla_fx.backends.cuda":  # reached as a top-level name from the checkout
    raise ImportError(f"import this package as 'mla_fx.backends.cuda', not {__name__!r}")

from collections.abc import Mapping
from typing import Final

import torch

from mla_fx.backends.backend import Rule, rules_of
from mla_fx.effects import InputError, Op

#: Op to rule.  A collective's rule is a generator (see `mla_fx.backends.torch_streams`).
RULES: Final[Mapping[type[Op], Rule]] = rules_of(__name__)


def require_gpu() -> None:
    """Raises `InputError` saying what is missing where torch finds no CUDA GPU."""
    if torch.version.cuda is None:
        raise InputError(
            "backend: cuda needs a torch that is built with CUDA (pip install torch==2.13.0 from an index with cu in "
            f"its name) and an NVIDIA GPU: got torch {torch.__version__}, built without"
        )
    if not torch.cuda.is_available():
        raise InputError(
            f"backend: cuda needs an NVIDIA GPU and a driver for CUDA {torch.version.cuda}: got torch "
            f"{torch.__version__}, which finds none"
        )
