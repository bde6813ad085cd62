"""Flags by which the ranks of a host wait for each other in the middle of a kernel.

Every rank has a flag for each rank, in its own memory. A rank that has come as far as its peers
need writes the number of the call into its flag of every rank; a wait reads only the flags in the
rank's own memory. All ranks make the same calls in the same order::

    call = ...                             the same number on every rank, one more each time
    meet_peers(flags, call, abort, RANK)   what all ranks wrote before is now visible here

Numbers only grow, so no flag is ever reset, and a rank may be a call ahead of another. A replayed
CUDA graph needs no help of the host if the number of the call is on the device.
"""

from __future__ import annotations

from mrv1.kernels._base.triton import INTERPRET, tl, triton

_LOOK = tl.constexpr(1 if INTERPRET else 4096)
"""Polls between two looks at the word for failures, which a GPU reads from the host's memory."""


@triton.jit
def meet_peers(flag_ptrs, call, abort_ptr, RANK: tl.constexpr):
    """Tell every rank that this one has come to ``call``, and wait until all have.

    Returns whether all have come; 0 if a peer has failed. Any number of programs of a launch may
    call this, in any order: each tells the others, so that none waits for a program that does not
    run yet. What earlier *kernels* of a rank wrote, wherever, is visible to the peers afterwards;
    writes of the program itself are not.

    ``flag_ptrs``: a tuple, of each rank the [ranks] int32 in its memory; ``abort_ptr``: int32.
    """
    SIZE: tl.constexpr = len(flag_ptrs)
    LANES: tl.constexpr = triton.next_power_of_2(SIZE)
    peer = tl.arange(0, LANES)
    theirs_ptr = flag_ptrs[0] + RANK + peer * 0
    for i in tl.static_range(1, SIZE):
        theirs_ptr = tl.where(peer == i, flag_ptrs[i] + RANK, theirs_ptr)
    is_peer = peer < SIZE
    value = peer * 0 + call
    # Release: the writes of earlier kernels, which this program sees, come before the flag.
    tl.atomic_xchg(theirs_ptr, value, mask=is_peer, sem="release", scope="sys")
    own_ptr = flag_ptrs[RANK] + peer
    num_missing = 1
    num_polls = 0
    has_failed = 0
    while (num_missing != 0) & (has_failed == 0):
        seen = tl.atomic_add(own_ptr, peer * 0, mask=is_peer, sem="acquire", scope="sys")
        num_missing = tl.sum((is_peer & (seen - value < 0)).to(tl.int32), axis=0)
        num_polls += 1
        if (num_missing != 0) & (num_polls % _LOOK == 0):
            has_failed = tl.load(abort_ptr, volatile=True)
    tl.debug_barrier()  # what the polling threads have acquired, all threads read from here on
    return has_failed == 0
