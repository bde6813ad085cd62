"""mrv1 inside vLLM."""
