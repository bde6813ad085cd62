"""Which KV heads see everything, and which only sinks and a window."""

from mrv1.headwise.policy import FULL, HeadPolicy, Visible

__all__ = ["FULL", "HeadPolicy", "Visible"]
