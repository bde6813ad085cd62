"""Kernels are compiled with floating-point fusion, unless the user has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
from mrv1.kernels._base.triton import triton
language = triton.knobs.language
requested = getattr(language, "fp_fusion_enabled", lambda _: language.default_fp_fusion)(None)
print(requested, language.default_fp_fusion)
"""


@pytest.mark.parametrize(("chosen", "fuses"), [(None, True), ("0", False), ("1", True)])
def test_fusion_is_on_unless_the_user_chose_otherwise(chosen: str | None, fuses: bool):
    """No warning may appear; triton 3.9 warns where the user has not chosen."""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_DEFAULT_FP_FUSION"}
    if chosen is not None:
        environment["TRITON_DEFAULT_FP_FUSION"] = chosen
    command = [sys.executable, "-W", "error::UserWarning", "-c", CODE]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert child.stdout.split() == [str(fuses)] * 2, child.stderr
