"""Measurements: what is timed, what a perfect machine would need, and one schema for results."""

from mrv1.bench.generate import GenerateBench, run_generate
from mrv1.bench.shapes import SHAPES, shape_config

__all__ = ["SHAPES", "GenerateBench", "run_generate", "shape_config"]
