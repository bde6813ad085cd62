"""mrv1: a Triton-first GPU model runner for LLM inference.

The names below are the public API; ``mrv1.kernels`` holds the ops, and ``mrv1.testing`` the
hypothesis strategies that test them. A name is imported on first use, and torch with the first
name that needs it.
"""

from typing import TYPE_CHECKING

from mrv1 import environment as environment  # reads TRITON_INTERPRET now, once for the process
from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.calibration import CalibrateOptions, Calibration, calibrate
    from mrv1.config import EngineConfig
    from mrv1.engine import (
        LLM,
        AsyncLLM,
        CompletionOutput,
        Logprob,
        LoRARequest,
        RequestOutput,
        TextPrompt,
        TokensPrompt,
    )
    from mrv1.errors import (
        CapacityError,
        ConfigError,
        Mrv1Error,
        RequestError,
        StepError,
        UnsupportedDeviceError,
    )
    from mrv1.headwise import HeadPolicy, HeadRanking, Visible
    from mrv1.integrations.llguidance import StructuredOutputsParams
    from mrv1.multimodal import MultimodalItem
    from mrv1.runner import AsyncOutput, ModelRunner, StepOutput, StepPlan
    from mrv1.sampler import LogitsContext, LogitsProcessor, SamplingParams
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "calibration": ["CalibrateOptions", "Calibration", "calibrate"],
            "config": ["EngineConfig"],
            "engine": [
                "LLM",
                "AsyncLLM",
                "CompletionOutput",
                "LoRARequest",
                "Logprob",
                "RequestOutput",
                "TextPrompt",
                "TokensPrompt",
            ],
            "errors": [
                "CapacityError",
                "ConfigError",
                "Mrv1Error",
                "RequestError",
                "StepError",
                "UnsupportedDeviceError",
            ],
            "headwise": ["HeadPolicy", "HeadRanking", "Visible"],
            "integrations.llguidance": ["StructuredOutputsParams"],
            "multimodal": ["MultimodalItem"],
            "runner": ["AsyncOutput", "ModelRunner", "StepOutput", "StepPlan"],
            "sampler": ["LogitsContext", "LogitsProcessor", "SamplingParams"],
        },
    )

__version__ = "0.3.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncOutput",
    "CalibrateOptions",
    "Calibration",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "HeadPolicy",
    "HeadRanking",
    "LoRARequest",
    "LogitsContext",
    "LogitsProcessor",
    "Logprob",
    "ModelRunner",
    "Mrv1Error",
    "MultimodalItem",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StepError",
    "StepOutput",
    "StepPlan",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "UnsupportedDeviceError",
    "Visible",
    "__version__",
    "calibrate",
]
