"""The hand-off that racecheck reports, for the compile check."""

from __future__ import annotations

import torch

from benchmarks.handoff import _handoff_kernel
from mrv1.testing.aot import AotCase, Target, pointer


def cases(target: Target) -> list[AotCase]:
    handoff = AotCase(
        name="handoff", kernel=_handoff_kernel, args=(pointer(torch.int32), 20), constexprs={}
    )
    return [handoff] if target.name == "sm_90" else []
