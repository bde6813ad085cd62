"""Which KV heads see everything, and which only sinks and a window."""

from mrv1.headwise.groups import HeadGroup, HeadGroups
from mrv1.headwise.policy import FULL, HeadPolicy, Visible

__all__ = ["FULL", "HeadGroup", "HeadGroups", "HeadPolicy", "Visible"]
