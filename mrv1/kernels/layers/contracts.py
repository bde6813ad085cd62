"""Types of the layers' arguments."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu_and_mul"]
"""The activations that ``linear`` can apply."""
