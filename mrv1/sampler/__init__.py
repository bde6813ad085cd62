"""Sampling: parameters, state per slot, and the draw. Names are imported on first use."""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.kernels.sampling.contracts import History
    from mrv1.sampler.grammar import Grammar, GrammarMatcher, GrammarSource
    from mrv1.sampler.params import SamplingParams
    from mrv1.sampler.processors import LogitsContext, LogitsProcessor, LogitsProcessors
    from mrv1.sampler.sampler import Sampler, SamplerLimits
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "grammar": ["Grammar", "GrammarMatcher", "GrammarSource"],
            "params": ["SamplingParams"],
            "processors": ["LogitsContext", "LogitsProcessor", "LogitsProcessors"],
            "sampler": ["History", "Sampler", "SamplerLimits"],
        },
    )

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
