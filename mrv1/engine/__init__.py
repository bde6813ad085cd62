"""Requests, scheduling, blocks and outputs: pure host code."""

from mrv1.engine.adapters import LoRARequest
from mrv1.engine.async_llm import AsyncLLM
from mrv1.engine.core import EngineCore
from mrv1.engine.llm import LLM
from mrv1.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from mrv1.engine.prompts import TextPrompt, TokensPrompt

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineCore",
    "LoRARequest",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "TextPrompt",
    "TokensPrompt",
]
