"""Sampling parameters for callers who give none, from a checkpoint's ``generation_config.json``.

The fields are those that vLLM reads; the file's other settings, such as ``do_sample``, are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrv1.errors import ConfigError, RequestError, short
from mrv1.models import Checkpoint
from mrv1.sampler import SamplingParams
from mrv1.sampler.params import OF_CHECKPOINT

OVERRIDE = "override_generation_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values of ``SamplingParams`` fields, and where they come from."""

    values: dict[str, Any]  # by field of ``SamplingParams``; the others keep their own defaults
    description: str  # for the start-up line; empty if there are no values

    @classmethod
    def read(
        cls,
        checkpoint: Checkpoint,
        source: str | Path | None,
        override: Mapping[str, Any] | None = None,
    ) -> SamplingDefaults:
        """Return a model's defaults, with those of ``override`` (None removes one).

        ``source``: ``EngineConfig.generation_config``. ConfigError: a value or the file is wrong;
        the message names the file and the field.
        """
        file, content = checkpoint.generation_config(source)
        is_off = source in ("vllm", None)
        given = {} if is_off else {name: content.get(name) for name in OF_CHECKPOINT}
        if override is not None and not isinstance(override, Mapping):
            raise ConfigError(f"{OVERRIDE}: expected a dict or None, got {short(override)}")
        replaced = dict(override or {})
        unknown = [name for name in replaced if name not in OF_CHECKPOINT]
        if unknown:
            raise ConfigError(
                f"{OVERRIDE}: expected some of {', '.join(OF_CHECKPOINT)}; got {short(unknown)}"
            )
        kept = {name: value for name, value in given.items() if name not in replaced}
        values: dict[str, Any] = {}
        parts = []
        for where, fields in ((str(file), kept), (OVERRIDE, replaced)):
            checked = {
                OF_CHECKPOINT[name]: _checked(where, name, value)
                for name, value in fields.items()
                if value is not None
            }
            if checked:
                listed = ", ".join(f"{name}={value}" for name, value in checked.items())
                parts.append(f"{listed} from {where}")
            values |= checked
        return cls(
            values=values, description=f"sampling defaults {' and '.join(parts)}" if parts else ""
        )


def _checked(where: str, name: str, value: Any) -> Any:  # noqa: ANN401 - from JSON
    """Return a value as ``SamplingParams`` stores it."""
    field = OF_CHECKPOINT[name]
    try:
        return getattr(SamplingParams(**{field: value}), field)
    except RequestError as error:
        reason = str(error).removeprefix(f"{field}: ")
        raise ConfigError(f"{where}: {name}: {reason}") from error
