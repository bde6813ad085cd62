"""Adapters to other packages, which are imported only when they are used."""
