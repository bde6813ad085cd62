"""What every kernel stands on: the one import of triton, argument checks, dependent launch."""
