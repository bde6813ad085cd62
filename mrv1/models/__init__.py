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

from mrv1.models.batch import AttentionBatch as AttentionBatch
from mrv1.models.batch import LayerCache as LayerCache
from mrv1.models.checkpoint import Checkpoint as Checkpoint
from mrv1.models.config import ModelConfig as ModelConfig
from mrv1.models.decoder import DecoderModel as DecoderModel
from mrv1.models.loading import load_model as load_model
from mrv1.models.loading import random_model as random_model
from mrv1.models.parallel import ParallelContext as ParallelContext
from mrv1.models.places import Place as Place
from mrv1.models.places import memory_of as memory_of
from mrv1.models.rope import RopeConfig as RopeConfig
from mrv1.models.updating import NamedTensors as NamedTensors
from mrv1.models.updating import checked_update as checked_update
from mrv1.models.weights import ModelWeights as ModelWeights
from mrv1.models.weights import Weight as Weight
from mrv1.models.weights import checkpoint_places as checkpoint_places
from mrv1.models.weights import checkpoint_tensors as checkpoint_tensors
from mrv1.models.weights import empty_weights as empty_weights
from mrv1.models.weights import random_weights as random_weights
