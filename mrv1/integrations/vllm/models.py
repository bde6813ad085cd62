"""vLLM's models with mrv1's options: a head policy, mrv1's draw, or both.

``--additional-config`` gives the options, and vLLM's registry the classes, by the name of the
architecture: ``--hf-overrides`` puts ``Mrv1`` in front of the checkpoint's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from mrv1.errors import ConfigError
from mrv1.integrations.vllm.draw_sampler import DrawModelState, check_support
from mrv1.integrations.vllm.head_order import reordered
from mrv1.integrations.vllm.head_wise import divide_heads
from mrv1.integrations.vllm.model_options import ARCHITECTURES, HEAD_POLICY, SAMPLER
from mrv1.integrations.vllm.versions import resolve

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig

SAMPLERS = ("vllm", "mrv1")


class Mrv1Model:
    """Adds mrv1's options to a model of vLLM; stands before the model's class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        """Build the model with the options; ConfigError if none, or if vLLM's are unsupported."""
        sampler = vllm_config.additional_config.get(SAMPLER, "vllm")
        if sampler not in SAMPLERS:
            raise ConfigError(f"{SAMPLER}: expected one of {SAMPLERS}, got {sampler!r}")
        draws = sampler == "mrv1"
        if draws:
            check_support(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        self._draws = draws
        orders = divide_heads(self, vllm_config)  # type: ignore[arg-type]
        self._head_orders = orders or {}
        if orders is None and not draws:
            raise ConfigError(
                f"additional_config: expected {HEAD_POLICY}, the name of a JSON file that "
                f"HeadPolicy.save wrote, or {SAMPLER}='mrv1', got neither; without them use "
                "vLLM's own architecture"
            )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's tensors, with KV heads as the ranks have them."""
        names: set[str] = super().load_weights(  # type: ignore[misc]
            reordered(weights, self._head_orders)
        )
        return names

    def get_model_state_cls(self) -> type[DefaultModelState]:
        """Return the class by which vLLM's runner asks for a sampler."""
        return DrawModelState if self._draws else DefaultModelState


for _name, _module in ARCHITECTURES.items():
    _base = resolve(f"vllm.model_executor.models.{_module}:{_name}")
    _names = {"__module__": __name__, "__doc__": f"vLLM's {_name} with mrv1's options."}
    globals()[f"Mrv1{_name}"] = type(_base)(f"Mrv1{_name}", (Mrv1Model, _base), _names)
