"""Sampling: parameters, state per slot, and the draw. Names are imported on first use."""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.kernels.sampling.contracts import History as History
    from mrv1.sampler.grammar import Grammar as Grammar
    from mrv1.sampler.grammar import GrammarMatcher as GrammarMatcher
    from mrv1.sampler.grammar import GrammarSource as GrammarSource
    from mrv1.sampler.params import SamplingParams as SamplingParams
    from mrv1.sampler.processors import LogitsContext as LogitsContext
    from mrv1.sampler.processors import LogitsProcessor as LogitsProcessor
    from mrv1.sampler.processors import LogitsProcessors as LogitsProcessors
    from mrv1.sampler.sampler import Sampler as Sampler
    from mrv1.sampler.sampler import SamplerLimits as SamplerLimits
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "grammar": ["Grammar", "GrammarMatcher", "GrammarSource"],
            "params": ["SamplingParams"],
            "processors": ["LogitsContext", "LogitsProcessor", "LogitsProcessors"],
            "sampler": ["History", "Sampler", "SamplerLimits"],
        },
    )
