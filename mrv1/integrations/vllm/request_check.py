"""Refuses a request alone, when it arrives: ``--logits-processors`` names the class.

A worker can end no request, and only here vLLM calls other people's code for each new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrv1.integrations.vllm.sampling import check_request
from mrv1.integrations.vllm.versions import interface, resolve

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams as VllmParams

_BASES = tuple(resolve(name) for name in interface().logits_processors)


class RequestCheck(*_BASES):  # type: ignore[misc]
    """Checks sampling parameters for mrv1's worker; it processes no logits and has no instance."""

    @classmethod
    def validate_params(cls, sampling_params: VllmParams) -> None:
        """Raise a ``RequestError``, which vLLM reports for this request alone."""
        check_request(sampling_params)
