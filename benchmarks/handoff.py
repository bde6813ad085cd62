"""A hand-off between groups of warps as in the prefill queue, and nothing else.

One warp writes items into two slots of shared memory, and four warps read them. Each group orders
its accesses with a barrier of its warps, after which one of its threads arrives at an mbarrier;
the other group waits there. The sum that the readers store shows that every item came through.

racecheck reports this program too: it does not follow an arrival of one thread for its warps. So
what it reports of the queue says nothing about the queue. Needs a Hopper GPU.
"""

from __future__ import annotations

import torch

from mrv1.kernels._base.gluon import fence_async_shared, gl, gluon, mbarrier, thread_barrier

NUM_ITEMS = 20
FIELDS = gl.constexpr(3)
SLOTS = gl.constexpr(2)
WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _write(items, ready, free, num_items):
    for item in range(num_items):
        slot = item % SLOTS
        mbarrier.wait(free.index(slot), ((item // SLOTS) & 1) ^ 1)
        for field in gl.static_range(FIELDS):
            value = gl.full([1], item * FIELDS + field, gl.int32, WARP)
            items.index(slot * FIELDS + field).store(value)
        thread_barrier()
        mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _read(sum_ptr, items, ready, free, num_items):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = gl.to_tensor(0)
    for item in range(num_items):
        slot = item % SLOTS
        mbarrier.wait(ready.index(slot), (item // SLOTS) & 1)
        for field in gl.static_range(FIELDS):
            total += gl.max(items.index(slot * FIELDS + field).load(layout), axis=0)
        thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
    gl.store(sum_ptr, total)


@gluon.jit
def _handoff_kernel(
    sum_ptr,  # [1] int32
    num_items,
):
    """Grid: one program."""
    FIELD: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], FIELD)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_read, (sum_ptr, items, ready, free, num_items)),
            (_write, (items, ready, free, num_items)),
        ],
        [1],
        [24],
    )


def run(device: torch.device) -> None:
    """Hand the items over; raise if the readers' sum is not theirs."""
    total = torch.zeros(1, dtype=torch.int32, device=device)
    _handoff_kernel[1,](total, NUM_ITEMS, num_warps=4)
    expected = sum(range(NUM_ITEMS * FIELDS.value))
    if int(total) != expected:
        raise RuntimeError(f"hand-off: expected a sum of {expected}, got {int(total)}")
