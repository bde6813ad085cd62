"""Measurements: timed runs, the floor that the memory bandwidth sets, one schema for results."""

from mrv1.bench.attention import run_attention
from mrv1.bench.attention_case import Cell
from mrv1.bench.attention_options import AttentionBench
from mrv1.bench.generate import GenerateBench, run_generate
from mrv1.bench.kv_write import KVWriteBench, run_kv_write
from mrv1.bench.peers.attention import PEERS
from mrv1.bench.plot import plot_attention, require_matplotlib
from mrv1.bench.runner import RunnerBench, run_runner
from mrv1.bench.shapes import SHAPES, shape_config

__all__ = [
    "PEERS",
    "SHAPES",
    "AttentionBench",
    "Cell",
    "GenerateBench",
    "KVWriteBench",
    "RunnerBench",
    "plot_attention",
    "require_matplotlib",
    "run_attention",
    "run_generate",
    "run_kv_write",
    "run_runner",
    "shape_config",
]
