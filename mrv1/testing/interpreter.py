"""Checks for Triton's CPU interpreter, of errors that it accepts and a GPU would not.

``mrv1.kernels`` corrects its results. To find stray addresses, overflow of int32 and failed device
assertions, call :func:`install` with ``debug=True`` and :func:`install_bounds`.
"""

from mrv1.kernels._base.interpreter import install, install_bounds

__all__ = ["install", "install_bounds"]
