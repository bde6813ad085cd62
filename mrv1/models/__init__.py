"""Decoder-only transformers on mrv1's kernels: configuration, weight loading, forward pass.

A weight's way from its file to its layer, in modules of which each imports only from those above:

1. ``architectures``: what differs between families, as a table, with ``experts`` and ``fused``;
   ``vision``: images in prompts.
2. ``hf_config``, with ``rope``: transformers' configuration as the fields of a ``ModelConfig``;
   ``quantization``: how matrices are stored, with ``places``.
3. ``checkpoint``: everything that is read of a directory or a GGUF file, with ``tokenizer``,
   ``gguf_file`` and ``gguf_vocab``.
4. ``config``: the ``ModelConfig`` of a checkpoint; ``parallel``: a rank's part of a model.
5. ``weights``: the tensors of a decoder, and the checkpoint's names of their parts.
6. ``decoder``: the forward pass, with ``batch`` and ``attention``.
7. ``loading``: a checkpoint's tensors as the weights of a decoder; ``updating``: new values later.
8. ``drafts``: a layer beside a decoder that predicts its next tokens.
"""

from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.checkpoint import Checkpoint
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.loading import load_model, random_model
from mrv1.models.parallel import ParallelContext
from mrv1.models.places import Place, memory_of
from mrv1.models.rope import RopeConfig
from mrv1.models.updating import NamedTensors, checked_update
from mrv1.models.weights import (
    ModelWeights,
    Weight,
    checkpoint_places,
    checkpoint_tensors,
    empty_weights,
    random_weights,
)

__all__ = [
    "AttentionBatch",
    "Checkpoint",
    "DecoderModel",
    "LayerCache",
    "ModelConfig",
    "ModelWeights",
    "NamedTensors",
    "ParallelContext",
    "Place",
    "RopeConfig",
    "Weight",
    "checked_update",
    "checkpoint_places",
    "checkpoint_tensors",
    "empty_weights",
    "load_model",
    "memory_of",
    "random_model",
    "random_weights",
]
