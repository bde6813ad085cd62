"""The ops of ``mrv1.kernels`` in plain torch, with the same names and signatures.

The oracles are the specification that each kernel is tested against, and the path ``reference``,
which runs on a CPU. They are written to be read, not to be fast, and compute in float32, or in
float64 where the input is float64. They make fewer checks of their arguments than the kernels do:
an oracle may take what a launch refuses.
"""

from __future__ import annotations

from mrv1.kernels._base.oracle import calls as calls
from mrv1.kernels.attention.reference import *  # noqa: F403
from mrv1.kernels.cache.reference import *  # noqa: F403
from mrv1.kernels.experts.reference import *  # noqa: F403
from mrv1.kernels.layers.reference import *  # noqa: F403
from mrv1.kernels.sampling.filters import kept_tokens as kept_tokens
from mrv1.kernels.sampling.reference import *  # noqa: F403
from mrv1.kernels.step.reference import *  # noqa: F403
