"""Paged decode attention, and the plan that divides its work."""
