"""Paged prefill attention: the portable kernel, those of Hopper, and the choice among them."""
