"""Tensor-parallel ranks: a runner whose model is spread over several processes of one host.

``parallel_runner`` is rank 0's runner; ``processes`` starts and ends the other ranks, whose main
function is in ``child``; ``watch`` ends what waits for a rank that has failed. Each rank has the
``links`` with the others: collectives (``groups``) and shared GPU memory (``symmetric_memory``).
"""

from mrv1.runner.ranks.parallel_runner import ParallelRunner as ParallelRunner
