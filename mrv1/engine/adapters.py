"""LoRA adapters of an engine: those that are loaded, and which of them the device has."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mrv1.config import EngineConfig, texts
from mrv1.environment import INT32_MAX
from mrv1.errors import ConfigError, RequestError, short
from mrv1.from_vllm import ADAPTER, translated
from mrv1.models import Checkpoint
from mrv1.models.lora import StoredAdapter, read_adapter
from mrv1.options import check_fields, integers
from mrv1.runner import ModelRunner


class _NamesOfVLLM(type):
    """Takes vLLM's other names of fields, or refuses them with what to do instead."""

    def __call__(cls, *args: Any, **given: Any) -> Any:  # noqa: ANN401 - of any field
        own = translated(given, ADAPTER, "a field of LoRARequest", RequestError)
        return super().__call__(*args, **own)


@dataclass(frozen=True, slots=True)
class LoRARequest(metaclass=_NamesOfVLLM):
    """The LoRA adapter of a request, with vLLM's names and order of fields.

    Raises:
        RequestError: a field is out of its range; the message names it.
    """

    lora_name: Annotated[str, texts("a name")]
    """The adapter's own name."""
    lora_int_id: Annotated[int, integers(1, INT32_MAX)]
    """The adapter's own number."""
    lora_path: Annotated[str | Path, texts("a folder", ".*", types=(str, Path))] = ""
    """The folder that PEFT has written; "" = the adapter is loaded already."""
    base_model_name: str | None = None
    """The model that it was trained for; not read."""

    def __post_init__(self) -> None:
        """Check every field."""
        check_fields(self, RequestError, "lora_request: ")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in the host's memory."""

    request: LoRARequest
    """Its name, number and folder."""
    stored: StoredAdapter
    """Its matrices."""
    key: bytes
    """Of keys and values that are computed with it; no other adapter has it, nor a later copy of
    the same folder, which may have changed."""


class Adapters:
    """The adapters that requests may have, by their numbers."""

    def __init__(self, config: EngineConfig, runner: ModelRunner) -> None:
        self._config, self._runner = config, runner
        self._by_id: dict[int, LoadedAdapter] = {}
        self._keys = itertools.count()
        self._removed: set[bytes] = set()
        """Keys of those that were removed."""

    @property
    def ids(self) -> set[int]:
        """The numbers of all."""
        return {*self._by_id}

    def get(self, lora_int_id: int) -> LoadedAdapter:
        """Return an adapter; RequestError: none has this number."""
        found = self._by_id.get(lora_int_id)
        if found is None:
            raise RequestError(
                f"lora_int_id: expected the number of a loaded adapter, got {short(lora_int_id)}"
            )
        return found

    def prepared(self, lora_request: object) -> LoadedAdapter:
        """Return the adapter that is asked for, read if need be; any thread may call it.

        RequestError: ``enable_lora`` is off, name or number are another adapter's, or the folder
        is not of an adapter for this model.
        """
        if not isinstance(lora_request, LoRARequest):
            raise RequestError(
                f"lora_request: expected None or a LoRARequest, got {short(lora_request)}"
            )
        if not self._config.enable_lora:
            raise RequestError(
                "lora_request: expected enable_lora=True with it, got False; make the engine with "
                "enable_lora=True"
            )
        known = self._known(lora_request)
        if known is not None:
            return known
        if not str(lora_request.lora_path):
            raise RequestError(
                f"lora_request: lora_path: expected a folder, as no adapter has the number "
                f"{lora_request.lora_int_id} yet, got ''"
            )
        model = self._runner.model
        try:
            stored = read_adapter(
                lora_request.lora_name,
                lora_request.lora_path,
                model.whole_config,
                Checkpoint.open(self._config.model, progress=False),
                max_rank=self._config.max_lora_rank,
            )
        except ConfigError as error:
            raise RequestError(f"lora_request: {error}") from error
        if model.device.type == "cuda":
            stored = stored.pinned(model.dtype)
        return LoadedAdapter(lora_request, stored, b"adapter %d" % next(self._keys))

    def add(self, adapter: LoadedAdapter) -> bool:
        """Let requests have an adapter; return False if they may already.

        RequestError: its name or number is another adapter's by now.
        """
        if self._known(adapter.request) is not None:
            return False
        self._by_id[adapter.request.lora_int_id] = adapter
        return True

    def adopted(self, adapter: LoadedAdapter) -> LoadedAdapter:
        """Return the adapter of a request for which ``prepared`` has found ``adapter`` before.

        It is the one that other calls have added meanwhile, if they have: requests of one adapter
        share its slot and prefixes. One that was removed meanwhile is not added again.

        RequestError: as ``add``.
        """
        if adapter.key in self._removed:
            return adapter
        self.add(adapter)
        return self.get(adapter.request.lora_int_id)

    def remove(self, lora_int_id: int) -> LoadedAdapter | None:
        """Forget an adapter, and return it; None = there is none of this number."""
        removed = self._by_id.pop(lora_int_id, None)
        if removed is not None:
            self._removed.add(removed.key)
        return removed

    def _known(self, asked: LoRARequest) -> LoadedAdapter | None:
        """Return the adapter that is asked for; RequestError: another has its name or number."""
        for each in tuple(self._by_id.values()):
            known = each.request
            same_name = known.lora_name == asked.lora_name
            same_id = known.lora_int_id == asked.lora_int_id
            if same_name and same_id and str(asked.lora_path) in ("", str(known.lora_path)):
                return each
            if same_name or same_id:
                raise RequestError(
                    "lora_request: expected a name and a number that no other adapter has, got "
                    f"{asked.lora_name!r} ({asked.lora_int_id}, {str(asked.lora_path)!r}) beside "
                    f"{known.lora_name!r} ({known.lora_int_id}, {str(known.lora_path)!r}); remove "
                    "that one first, or choose others"
                )
        return None


class AdapterSlots:
    """Which adapter each slot of the device has, and how many running requests have that adapter.

    A slot without such requests keeps its adapter until another one needs it: the slot that was
    used longest ago. What the scheduler decides is on the device before its step is launched.
    """

    def __init__(self, num_slots: int) -> None:
        self._held: dict[int, LoadedAdapter | None] = dict.fromkeys(range(num_slots))
        """By slot, the one that was used longest ago first."""
        self._users: Counter[int] = Counter()
        self._pinned: set[LoadedAdapter] = set()
        self._loads: dict[int, LoadedAdapter] = {}

    def find(self, adapter: LoadedAdapter | None) -> int | None:
        """Return the slot for a request with an adapter, -1 without; None = it has to wait."""
        if adapter is None:
            return -1
        free: list[int] = []
        for slot, held in self._held.items():
            if held is adapter:
                return slot
            if not self._users[slot] and held not in self._pinned:
                free.append(slot)
        empty = [slot for slot in free if self._held[slot] is None]
        return next(iter(empty or free), None)

    def enter(self, slot: int, adapter: LoadedAdapter | None) -> int:
        """Take a slot of ``find`` for a request that enters, and return it."""
        if adapter is not None:
            if self._held.pop(slot) is not adapter:
                self._loads[slot] = adapter
            self._held[slot] = adapter
            self._users[slot] += 1
        return slot

    def leave(self, slot: int) -> int:
        """Give back the slot of a request that leaves; return -1."""
        if slot != -1:
            self._users[slot] -= 1
        return -1

    def take_loads(self) -> list[tuple[int, LoadedAdapter]]:
        """Return slots that have got another adapter since the last call, and the adapter."""
        loads, self._loads = self._loads, {}
        return [*loads.items()]

    def pin(self, adapter: LoadedAdapter) -> None:
        """Keep an adapter in a slot, now or once it has one; RequestError: no slot would be left.

        The last slot is for adapters that take turns.
        """
        if len(self._pinned | {adapter}) >= len(self._held):
            raise RequestError(
                f"pin_lora: expected fewer pinned adapters than max_loras ({len(self._held)}), "
                f"got {len(self._pinned | {adapter})}"
            )
        self._pinned.add(adapter)

    def drop(self, adapter: LoadedAdapter) -> None:
        """Pin an adapter no longer; if no running request has it, its slot is empty."""
        self._pinned.discard(adapter)
        for slot, held in self._held.items():
            if held is adapter and not self._users[slot]:
                self._held[slot] = None
                self._loads.pop(slot, None)

    def lose(self, slot: int) -> None:
        """Take a slot that no running request uses for empty."""
        self._held[slot] = None

    def is_pinned(self, slot: int) -> bool:
        """Say whether a slot keeps its adapter."""
        return self._held[slot] in self._pinned

    def reset(self) -> None:
        """Take all slots for empty: no request runs, and the device may have lost what they held.

        It gets an adapter again with the next request that has it.
        """
        self._users.clear()
        self._held = dict.fromkeys(self._held)
        self._loads.clear()
