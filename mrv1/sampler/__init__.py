"""Sampling: parameters, per-slot state on the device, and the draw."""

from mrv1.kernels.sampling.contracts import History
from mrv1.sampler.grammar import Grammar, GrammarMatcher, GrammarSource
from mrv1.sampler.params import SamplingParams
from mrv1.sampler.processors import LogitsContext, LogitsProcessor, LogitsProcessors
from mrv1.sampler.sampler import Sampler, SamplerLimits

__all__ = [
    "Grammar",
    "GrammarMatcher",
    "GrammarSource",
    "History",
    "LogitsContext",
    "LogitsProcessor",
    "LogitsProcessors",
    "Sampler",
    "SamplerLimits",
    "SamplingParams",
]
