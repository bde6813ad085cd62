"""The runner executes one step: slot state, batch, KV cache, layers, sampling, output."""

from mrv1.runner.async_output import AsyncOutput as AsyncOutput
from mrv1.runner.kv_listener import EachRank as EachRank
from mrv1.runner.kv_listener import KVListener as KVListener
from mrv1.runner.kv_listener import KVReady as KVReady
from mrv1.runner.kv_listener import KVTokens as KVTokens
from mrv1.runner.model_runner import ModelRunner as ModelRunner
from mrv1.runner.ranks import ParallelRunner as ParallelRunner
from mrv1.runner.report import KVGroupReport as KVGroupReport
from mrv1.runner.report import KVReport as KVReport
from mrv1.runner.report import KVUsage as KVUsage
from mrv1.runner.step import RequestId as RequestId
from mrv1.runner.step import RowFailure as RowFailure
from mrv1.runner.step import SlotRequest as SlotRequest
from mrv1.runner.step import StagedFeatures as StagedFeatures
from mrv1.runner.step import StepOutput as StepOutput
from mrv1.runner.step import StepPlan as StepPlan
from mrv1.runner.step import TokenLogprobs as TokenLogprobs
