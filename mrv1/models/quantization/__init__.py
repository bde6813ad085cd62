"""Quantized checkpoints: what their configuration says, and where their tensors go.

A module for each family of formats turns settings into a ``Quantization``, which says for each
linear module of the checkpoint, by its own, unfused name, which ``ModuleFormat`` it has. A format
allocates the ``QuantizedWeight`` of a layer, in which modules are fused, and gives a ``Place`` for
each stored tensor of a module. Imports go from ``reading`` to the families, to ``scheme``, to
``formats``.
"""

from mrv1.models.quantization.formats import ModuleFormat, ModulePart, shared_rows, zero_problem
from mrv1.models.quantization.gguf import GGUFBlocks
from mrv1.models.quantization.mxfp4 import MXFP4
from mrv1.models.quantization.online import OnlineFP8
from mrv1.models.quantization.reading import as_asked, read_quantization
from mrv1.models.quantization.scheme import Quantization

__all__ = [
    "MXFP4",
    "GGUFBlocks",
    "ModuleFormat",
    "ModulePart",
    "OnlineFP8",
    "Quantization",
    "as_asked",
    "read_quantization",
    "shared_rows",
    "zero_problem",
]
