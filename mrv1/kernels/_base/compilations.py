"""Counts of the kernels that Triton compiled or loaded; serving must add none."""

from __future__ import annotations

from collections import Counter

_counts: Counter[str] = Counter()
_is_watched = False


def watch_compilations() -> Counter[str]:
    """Return live counts by kernel name since the first call; an earlier hook is still called."""
    global _is_watched
    if not _is_watched:
        from mrv1.kernels._base.triton import triton

        _is_watched = True
        runtime = triton.knobs.runtime
        earlier = runtime.jit_post_compile_hook

        def counted(**about: object) -> object:
            _counts[getattr(about.get("fn"), "name", "?")] += 1
            return earlier(**about) if earlier is not None else None

        runtime.jit_post_compile_hook = counted
    return _counts
