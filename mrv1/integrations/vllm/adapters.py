"""vLLM's LoRA requests as adapters of mrv1 in slots of the device."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mrv1.config import EngineConfig
from mrv1.engine import LoRARequest
from mrv1.engine.adapters import Adapters, AdapterSlots, LoadedAdapter
from mrv1.errors import ConfigError
from mrv1.runner import ModelRunner


class WorkerAdapters:
    """The adapters of a worker: vLLM names them, and counts those of a step."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._loaded = Adapters(config, runner)
        self._slots = AdapterSlots(config.max_loras if config.enable_lora else 0)
        self._slot_of: dict[str, int] = {}
        """Of requests with an adapter."""
        self._adapter_of_request: dict[str, LoadedAdapter] = {}
        """Of the same requests, and of those whose slot another adapter has taken."""

    @property
    def ids(self) -> set[int]:
        """The numbers of all adapters."""
        return self._loaded.ids

    def add(self, asked: Any) -> None:  # noqa: ANN401 - vLLM's LoRARequest
        """Read an adapter if need be, or again; RequestError: it is not one of the model."""
        if getattr(asked, "load_inplace", False):
            self.remove(asked.lora_int_id)
        self._adapter_of(asked)

    def _adapter_of(self, asked: Any) -> LoadedAdapter:  # noqa: ANN401 - as ``add``
        request = LoRARequest(asked.lora_name, asked.lora_int_id, asked.lora_path)
        adapter = self._loaded.prepared(request)
        self._loaded.add(adapter)
        return adapter

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter; return whether there was one."""
        removed = self._loaded.remove(lora_int_id)
        if removed is not None:
            self._slots.drop(removed)
        return removed is not None

    def pin(self, lora_int_id: int) -> None:
        """Keep an adapter in its slot; RequestError: there is none, or no slot would be left."""
        self._slots.pin(self._loaded.get(lora_int_id))

    def enter(self, req_id: str, asked: Any, scheduled: Collection[str]) -> int:  # noqa: ANN401
        """Return the slot of a request that enters; -1 = it has no adapter.

        vLLM counts the adapters of the requests that it schedules in a step, ``scheduled``. Others
        that it has not ended yet mostly wait for their end; those of one slot lose it if another
        adapter needs it, and get one back if they are scheduled again (``restore``).
        """
        if asked is None:
            return -1
        adapter = self._adapter_of_request[req_id] = self._adapter_of(asked)
        return self._take(req_id, adapter, scheduled)

    def _take(self, req_id: str, adapter: LoadedAdapter, scheduled: Collection[str]) -> int:
        slot = self._slots.find(adapter)
        if slot is None:
            self._free_idle_slot(scheduled)
            slot = self._slots.find(adapter)
        if slot is None:
            raise ConfigError(
                "SchedulerOutput: expected at most max_loras adapters in a step, got more"
            )
        self._slot_of[req_id] = slot
        return self._slots.enter(slot, adapter)

    def _free_idle_slot(self, scheduled: Collection[str]) -> None:
        """Take the slot that no scheduled request uses, and whose requests entered first."""
        used = {self._slot_of[req_id] for req_id in self._slot_of.keys() & scheduled}
        for slot in {*self._slot_of.values()} - used:
            if self._slots.is_pinned(slot):
                used.add(slot)
        taken = next((slot for slot in self._slot_of.values() if slot not in used), None)
        for req_id in [each for each, slot in self._slot_of.items() if slot == taken]:
            self._slots.leave(self._slot_of.pop(req_id))

    def leave(self, req_id: str) -> None:
        """Give back the slot of a request, if it has one."""
        self._slots.leave(self._slot_of.pop(req_id, -1))
        self._adapter_of_request.pop(req_id, None)

    def restore(self, scheduled: Collection[str]) -> dict[str, int]:
        """Return the new slots of scheduled requests whose slot another adapter had taken.

        ConfigError: vLLM schedules more than ``max_loras`` adapters in a step.
        """
        lost = self._adapter_of_request.keys() - self._slot_of.keys()
        return {
            req_id: self._take(req_id, self._adapter_of_request[req_id], scheduled)
            for req_id in scheduled
            if req_id in lost
        }

    def write_to(self, runner: ModelRunner) -> None:
        """Write adapters to the slots that the next step needs."""
        for slot, adapter in self._slots.take_loads():
            runner.load_adapter(slot, adapter.stored)

    def forget_slots(self) -> None:
        """Take all slots for empty: the device has lost what they held."""
        self._slots.reset()
        self._slot_of.clear()
        self._adapter_of_request.clear()
