"""Training of the embedded ``tiny`` checkpoint (not part of the installed package)."""
