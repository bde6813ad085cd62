"""``--load-format mrv1_dummy``: vLLM's models with the weights that mrv1 makes up.

vLLM's own made-up weights route every token to the same experts where a model has a bias that
chooses, and mrv1's engine cannot have them. With these both have one model, on any GPUs, without
files; a checkpoint's ``config.json`` is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from mrv1.models import ModelConfig
from mrv1.models.dummy import made_up_tensors

if TYPE_CHECKING:
    from vllm.config import ModelConfig as VllmModelConfig

LOAD_FORMAT = "mrv1_dummy"


@register_model_loader(LOAD_FORMAT)
class MadeUpWeights(BaseModelLoader):  # type: ignore[misc]
    """Gives a model of vLLM the tensors of a checkpoint that is not there."""

    def download_model(self, model_config: VllmModelConfig) -> None:
        """Fetch nothing."""

    def load_weights(self, model: Any, model_config: VllmModelConfig) -> None:  # noqa: ANN401
        """Make up each tensor where the model is, as its checkpoint would have it.

        ConfigError: mrv1 does not have the architecture, or not so stored.
        """
        config = ModelConfig.from_pretrained(model_config.model)
        parameter: torch.Tensor = next(model.parameters())
        model.load_weights(
            made_up_tensors(config, device=parameter.device, dtype=model_config.dtype)
        )
