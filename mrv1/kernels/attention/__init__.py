"""Paged attention: decode and its plan, prefill, merge of partial results."""
