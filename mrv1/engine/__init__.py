"""Requests, scheduling, blocks and outputs: pure host code."""

from mrv1.engine.adapters import LoRARequest as LoRARequest
from mrv1.engine.async_llm import AsyncLLM as AsyncLLM
from mrv1.engine.core import EngineCore as EngineCore
from mrv1.engine.llm import LLM as LLM
from mrv1.engine.outputs import CompletionOutput as CompletionOutput
from mrv1.engine.outputs import Logprob as Logprob
from mrv1.engine.outputs import RequestMetrics as RequestMetrics
from mrv1.engine.outputs import RequestOutput as RequestOutput
from mrv1.engine.prompts import TextPrompt as TextPrompt
from mrv1.engine.prompts import TokensPrompt as TokensPrompt
