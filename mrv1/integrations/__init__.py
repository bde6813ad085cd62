"""Other systems' code, imported only when it is asked for."""
