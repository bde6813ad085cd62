"""Experts: the routing of tokens, and the products of the experts that a token is routed to."""
