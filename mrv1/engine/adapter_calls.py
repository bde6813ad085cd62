"""The calls of ``LLM`` that load adapters and forget them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mrv1.engine.adapters import LoRARequest
from mrv1.engine.guards import Turns, in_turn, reports

if TYPE_CHECKING:
    from mrv1.engine.shared_engine import SharedEngine


class AdapterCalls:
    """Loads LoRA adapters into an engine that threads share; ``LLM`` says who may call it."""

    shared: SharedEngine
    _turns: Turns

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before the first request has it; return False if it is loaded already.

        Its folder is read in this thread while requests run. It stays in the host's memory, and is
        on the device while requests that run have it, and until another one needs the slot.

        Raises:
            RequestError: ``enable_lora`` is off, name or number are another adapter's, or the
                folder is damaged, of another model, or needs what mrv1 lacks.
        """
        adapter = self.shared.engine.adapters.prepared(lora_request)
        return self._turns.take(lambda: self.shared.engine.adapters.add(adapter))

    @in_turn
    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; return False if there is none. Requests that have it keep it."""
        return self.shared.engine.remove_lora(lora_int_id)

    @in_turn
    def pin_lora(self, lora_int_id: int) -> bool:
        """Let an adapter keep its slot of the device once it has one; return True.

        Raises:
            RequestError: no such adapter is loaded, or all slots but one are pinned.
        """
        return self.shared.engine.pin_lora(lora_int_id)

    @reports
    def list_loras(self) -> set[int]:
        """Return the numbers of the loaded adapters."""
        return self.shared.engine.adapters.ids
