"""Decoder-only transformers on mrv1's kernels: configuration, weight loading, forward pass."""

from mrv1.models.batch import AttentionBatch, LayerCache
from mrv1.models.config import ModelConfig
from mrv1.models.decoder import DecoderModel
from mrv1.models.kv_scales import load_kv_scales
from mrv1.models.loading import load_model, random_model
from mrv1.models.parallel import ParallelContext
from mrv1.models.rope import RopeConfig
from mrv1.models.shards import stored_tensors
from mrv1.models.updating import NamedTensors, checked_update, copy_weights
from mrv1.models.weights import ModelWeights, checkpoint_tensors, random_weights

__all__ = [
    "AttentionBatch",
    "DecoderModel",
    "LayerCache",
    "ModelConfig",
    "ModelWeights",
    "NamedTensors",
    "ParallelContext",
    "RopeConfig",
    "checked_update",
    "checkpoint_tensors",
    "copy_weights",
    "load_kv_scales",
    "load_model",
    "random_model",
    "random_weights",
    "stored_tensors",
]
