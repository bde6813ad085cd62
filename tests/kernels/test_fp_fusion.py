"""Kernels are compiled with floating-point fusion, unless the user has chosen otherwise."""

from __future__ import annotations

import pytest

from tests.forks import Forks

CODE = """
import warnings
warnings.simplefilter("error", UserWarning)
from mrv1.kernels._base.triton import triton
language = triton.knobs.language
requested = getattr(language, "fp_fusion_enabled", lambda _: language.default_fp_fusion)(None)
print(requested, language.default_fp_fusion)
"""


@pytest.mark.parametrize(("chosen", "fuses"), [(None, True), ("0", False), ("1", True)])
def test_fusion_is_on_unless_the_user_chose_otherwise(
    forks: Forks, chosen: str | None, fuses: bool
):
    """No warning may appear; triton 3.9 warns where the user has not chosen."""
    run = forks.run(CODE, **({} if chosen is None else {"TRITON_DEFAULT_FP_FUSION": chosen}))
    assert run.stdout.split() == [str(fuses)] * 2, run.stderr
