"""mrv1: a Triton-first GPU model runner for LLM inference.

The names below are the public API; ``mrv1.kernels`` holds the ops, and ``mrv1.testing`` the
hypothesis strategies that test them. A name is imported on first use, and torch with the first
name that needs it.
"""

from typing import TYPE_CHECKING

from mrv1 import environment as environment  # reads TRITON_INTERPRET now, once for the process
from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.calibration import CalibrateOptions as CalibrateOptions
    from mrv1.calibration import Calibration as Calibration
    from mrv1.calibration import calibrate as calibrate
    from mrv1.config import EngineConfig as EngineConfig
    from mrv1.engine import LLM as LLM
    from mrv1.engine import AsyncLLM as AsyncLLM
    from mrv1.engine import CompletionOutput as CompletionOutput
    from mrv1.engine import Logprob as Logprob
    from mrv1.engine import LoRARequest as LoRARequest
    from mrv1.engine import RequestOutput as RequestOutput
    from mrv1.engine import TextPrompt as TextPrompt
    from mrv1.engine import TokensPrompt as TokensPrompt
    from mrv1.errors import CapacityError as CapacityError
    from mrv1.errors import ConfigError as ConfigError
    from mrv1.errors import Mrv1Error as Mrv1Error
    from mrv1.errors import RequestError as RequestError
    from mrv1.errors import StepError as StepError
    from mrv1.errors import UnsupportedDeviceError as UnsupportedDeviceError
    from mrv1.headwise import HeadPolicy as HeadPolicy
    from mrv1.headwise import HeadRanking as HeadRanking
    from mrv1.headwise import Visible as Visible
    from mrv1.integrations.llguidance import StructuredOutputsParams as StructuredOutputsParams
    from mrv1.multimodal import MultimodalItem as MultimodalItem
    from mrv1.runner import AsyncOutput as AsyncOutput
    from mrv1.runner import ModelRunner as ModelRunner
    from mrv1.runner import StepOutput as StepOutput
    from mrv1.runner import StepPlan as StepPlan
    from mrv1.sampler import LogitsContext as LogitsContext
    from mrv1.sampler import LogitsProcessor as LogitsProcessor
    from mrv1.sampler import SamplingParams as SamplingParams
else:
    __getattr__, __dir__, __all__ = lazy_names(
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
