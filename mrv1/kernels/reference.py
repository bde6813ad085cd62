"""The ops of ``mrv1.kernels`` in plain torch, with the same names and signatures.

This is the specification each kernel is tested against, and the path mrv1 takes on a CPU. It is
written to be read, not to be fast. Arithmetic is float32, or float64 where the input is.
"""

from __future__ import annotations

from mrv1.kernels._base.oracle import calls as calls
from mrv1.kernels.attention.reference import *  # noqa: F403
from mrv1.kernels.cache.reference import *  # noqa: F403
from mrv1.kernels.layers.reference import *  # noqa: F403
from mrv1.kernels.sampling.filters import kept_tokens as kept_tokens
from mrv1.kernels.sampling.reference import *  # noqa: F403
from mrv1.kernels.step.reference import *  # noqa: F403
