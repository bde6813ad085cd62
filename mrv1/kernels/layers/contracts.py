"""Types of the layers' arguments."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu_and_mul"]
"""What a linear layer may apply to its result."""
