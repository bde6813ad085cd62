"""Sampling: parameters, per-slot state on the device, and the draw."""

from mrv1.sampler.params import SamplingParams
from mrv1.sampler.sampler import Sampler, filter_logits

__all__ = ["Sampler", "SamplingParams", "filter_logits"]
