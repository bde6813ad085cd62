"""Measurements of mrv1 and of its peers, from a checkout: ``python -m benchmarks ...``."""
