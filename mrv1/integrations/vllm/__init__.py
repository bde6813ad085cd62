"""mrv1 inside vLLM; importing this package imports neither vLLM nor torch."""

from typing import TYPE_CHECKING

from mrv1.lazy import lazy_names

if TYPE_CHECKING:
    from mrv1.integrations.vllm.request_check import RequestCheck as RequestCheck
    from mrv1.integrations.vllm.worker import Worker as Worker
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__, {"request_check": ["RequestCheck"], "worker": ["Worker"]}
    )
