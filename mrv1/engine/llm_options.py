"""The options of ``LLM``, and the engine's configuration that follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from mrv1.config import EngineConfig
from mrv1.device import resolve_device
from mrv1.errors import ConfigError, short
from mrv1.from_vllm import OPTIONS, translated
from mrv1.headwise import HeadPolicy, policy_source
from mrv1.models import Checkpoint
from mrv1.options import env_fields
from mrv1.sampler import LogitsProcessor


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMOptions(EngineConfig):
    """The parameters of ``LLM``: the engine's options, and objects that no configuration holds."""

    model: str = field(kw_only=False)
    head_policy: HeadPolicy | str | Path | None = None  # type: ignore[assignment]
    logits_processors: Sequence[LogitsProcessor] = ()
    """The caller's own processors, which edit the logits of every step."""
    override_generation_config: Mapping[str, Any] | None = None
    """Sampling defaults that replace those of ``generation_config``, by the names of
    ``generation_config.json``: temperature, top_k, top_p, min_p, repetition_penalty,
    max_new_tokens."""
    use_tqdm_on_load: bool = True
    """Show progress bars while the model is downloaded and loaded and CUDA graphs are captured;
    only if stderr is a terminal."""


def policy_or_text(policy: object) -> HeadPolicy | str | None:
    """Return a policy, or the text that names one; ConfigError: it is neither, nor a path."""
    if isinstance(policy, Path):
        return str(policy)
    if policy is None or isinstance(policy, HeadPolicy | str):
        return policy
    raise ConfigError(
        f"head_policy: expected a HeadPolicy, a file, a folder or a rule, got {short(policy)}"
    )


def resolve_options(
    model: str | Path,
    head_policy: HeadPolicy | str | Path | None,
    options: Mapping[str, object],
    *,
    use_tqdm_on_load: bool,
) -> tuple[EngineConfig, Checkpoint, HeadPolicy | None]:
    """Return an engine's configuration, its checkpoint, on this machine, and its head policy.

    ConfigError, UnsupportedDeviceError: an option, the device or the checkpoint is wrong.
    TypeError: an option is unknown.
    """
    made = env_fields(EngineConfig)
    given = {
        name: value
        for name, value in translated(options, OPTIONS, "an option of LLM", ConfigError).items()
        if value is not None or name not in made
    }
    known = [each.name for each in fields(EngineConfig)]
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise TypeError(f"{name}: expected an option of LLM, got an unknown one{hint}")
    source = policy_or_text(head_policy)
    policy = source if isinstance(source, HeadPolicy) else None
    if isinstance(source, str):
        given["head_policy"] = source
    given["model"] = str(model) if isinstance(cast("object", model), Path) else model
    config = EngineConfig(**given)
    resolve_device(config.vision_device, "vision_device")  # not with the first image
    if policy is None and config.head_policy is not None:
        policy_source(config.head_policy)  # a mistake in it is found before a download
    if not isinstance(use_tqdm_on_load, bool):
        raise ConfigError(
            f"use_tqdm_on_load: expected True or False, got {short(use_tqdm_on_load)}"
        )
    checkpoint = Checkpoint.open(config.model, progress=use_tqdm_on_load)
    return replace(config, model=str(checkpoint.path)), checkpoint, policy
