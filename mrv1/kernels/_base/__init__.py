"""Shared parts of all kernels: the one import of triton, argument checks, dependent launch."""
