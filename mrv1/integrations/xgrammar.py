"""The former place of ``StructuredOutputsParams``, which ``mrv1`` exports."""

from mrv1.integrations.llguidance import StructuredOutputsParams

__all__ = ["StructuredOutputsParams"]
