"""Whole engines: steps, requests, serving, and vLLM on the same checkpoint."""
