"""Tensor-parallel ranks: a runner whose model is spread over several processes of one host.

``parallel_runner`` is rank 0's runner, ``processes`` starts and ends the other ranks, ``child``
is what they run, ``groups`` has the collectives of all, ``failure`` what a failed rank says.
"""

from mrv1.runner.ranks.parallel_runner import ParallelRunner

__all__ = ["ParallelRunner"]
