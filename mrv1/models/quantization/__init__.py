"""Quantized checkpoints: what their configuration says, and where their tensors go.

A module for each family of formats turns settings into a ``Quantization``, which says for each
linear module of the checkpoint, by its own, unfused name, which ``ModuleFormat`` it has. A format
allocates the ``QuantizedWeight`` of a layer, in which modules are fused, and gives a ``Place`` for
each stored tensor of a module. Imports go from ``reading`` to the families, to ``scheme``, to
``formats``.
"""

from mrv1.models.quantization.formats import ModuleFormat as ModuleFormat
from mrv1.models.quantization.formats import ModulePart as ModulePart
from mrv1.models.quantization.formats import shared_rows as shared_rows
from mrv1.models.quantization.formats import zero_problem as zero_problem
from mrv1.models.quantization.gguf import GGUFBlocks as GGUFBlocks
from mrv1.models.quantization.mxfp4 import MXFP4 as MXFP4
from mrv1.models.quantization.online import OnlineFP8 as OnlineFP8
from mrv1.models.quantization.reading import as_asked as as_asked
from mrv1.models.quantization.reading import read_quantization as read_quantization
from mrv1.models.quantization.scheme import Quantization as Quantization
