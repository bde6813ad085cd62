"""What ``adapter_config.json`` says: which modules have an adapter, and its rank and scaling.

PEFT's rules, restated: names are those of transformers' modules, such as
``model.layers.0.self_attn.q_proj``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mrv1.errors import ConfigError, short
from mrv1.models.files import raise_problems
from mrv1.options import Range, instances, integers, is_number

ALL_LINEAR = "all-linear"
"""``target_modules`` of every linear module but the head."""

VARIANTS = {
    "use_dora": "DoRA",
    "lora_bias": "biases of lora_B (lora_bias)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "layer_replication": "replicated layers",
    "megatron_config": "Megatron's layers",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow's routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trained tokens",
    "ensure_weight_tying": "tied adapters",
    "target_parameters": "adapters of parameters, such as fused experts",
}
"""Settings that change what an adapter computes, and are read nowhere: with a value, refused."""

WITHOUT_EFFECT = (
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    "velora_config",
)  # fmt: skip
"""Settings of training, of PEFT's own layers and files: they change no output."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""``init_lora_weights`` that begin so: they subtract an adapter's first values from the model's
weights."""

TASKS = (None, "CAUSAL_LM")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The settings that say where an adapter is added, and what."""

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: Mapping[str, int]
    """Ranks of modules, by a pattern; the first that matches, in the file's order, counts."""
    alpha_pattern: Mapping[str, float]
    target_modules: str | tuple[str, ...]
    """A regular expression of whole names, or names and ends of names."""
    exclude_modules: str | tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] = ()
    """Layers that have an adapter; () = all."""
    layers_pattern: tuple[str, ...] = ()
    """What comes before a layer's index in a name; () = any name."""
    bias: str = "none"

    def targets(self, name: str, *, is_linear: bool) -> bool:
        """Whether a module has an adapter; ``is_linear``: it is linear, and not the head."""
        exclude, target = self.exclude_modules, self.target_modules
        if _matches(exclude, name):
            return False
        # What is saved as a whole has no adapter in it.
        if any(re.match(rf"(^|.*\.){each}($|\..*)", name) for each in self.modules_to_save):
            return False
        if isinstance(target, str):
            return is_linear if target.lower() == ALL_LINEAR else _matches(target, name)
        if name in target:
            return True
        return _matches(target, name) and self._is_of_layers(name)

    def _is_of_layers(self, name: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in self.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            if found := re.match(pattern, name):
                return int(found[1]) in self.layers_to_transform
        return False

    def rank(self, name: str) -> int:
        """Return the rank of a module's adapter."""
        return int(_first(self.rank_pattern, name, self.r))

    def scaling(self, name: str) -> float:
        """Return the factor of a module's adapter."""
        rank = self.rank(name)
        alpha = _first(self.alpha_pattern, name, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(given: str | tuple[str, ...], name: str) -> bool:
    """Whether a name is that of an entry, or ends with one; or matches a regular expression."""
    if isinstance(given, str):
        return re.fullmatch(given, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in given)


def _first(patterns: Mapping[str, float], name: str, default: float) -> float:
    """Return the value of the first pattern that an end of the name matches, after a dot."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(found, default)


def read_settings(raw: Mapping[str, Any]) -> LoraSettings:
    """Return what a configuration says; one ConfigError lists all that is wrong or not served."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise ConfigError(f"peft_type: expected 'LORA', got {short(kind)}")
    problems = [*_refused(raw)]
    given: dict[str, Any] = {}
    for name, read in _READ.items():
        value = raw.get(name)
        if value is None and name not in _NEEDED:
            continue  # PEFT's default
        try:
            given[name] = read(value)
        except ValueError as error:
            problems.append(f"{name}: expected {error}, got {short(value)}")
    of_layers = {"layers_to_transform", "layers_pattern"} & {n for n, v in given.items() if v}
    if isinstance(given.get("target_modules"), str) and of_layers:
        problems.append(
            f"{min(of_layers)}: expected none where target_modules is a pattern, got one"
        )
    if of_layers == {"layers_pattern"}:
        problems.append("layers_to_transform: expected layers with layers_pattern, got none")
    raise_problems("adapter_config.json", problems)
    given = {"rank_pattern": {}, "alpha_pattern": {}, **given}
    return LoraSettings(**given)


def _refused(raw: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each setting that mrv1 does not serve, or does not know."""
    for name, what in VARIANTS.items():
        if raw.get(name):
            yield f"{name}: expected none, as mrv1 lacks {what}, got {short(raw[name])}"
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(CHANGES_BASE):
        yield (
            f"init_lora_weights: expected an adapter of the model as it is, got {init!r}, which "
            "changes the model's weights; save the adapter with "
            "path_initial_model_for_weight_conversion"
        )
    if raw.get("task_type") not in TASKS:
        yield f"task_type: expected 'CAUSAL_LM', got {short(raw['task_type'])}"
    known = {*VARIANTS, *WITHOUT_EFFECT, *(each.name for each in fields(LoraSettings))}
    known |= {"peft_type", "init_lora_weights"}
    for name, value in raw.items():
        if name not in known and value:
            yield f"{name}: expected no setting that mrv1 does not know, got {short(value)}"


def _within(allowed: Range) -> Callable[[Any], Any]:
    def read(value: object) -> object:
        if not allowed.holds(value):
            raise ValueError(allowed.expected)
        return value

    return read


def _is_finite(value: object) -> bool:
    return is_number(value) and abs(value) <= sys.float_info.max  # an integer may be larger


_rank = _within(integers(1))
_alpha = _within(Range("a finite number", _is_finite))
_BIASES = ("none", "all", "lora_only")


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("a list of names")
    return tuple(value)


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"regular expressions ({error})") from error
    return value


def _inner_pattern(value: str) -> str:
    """Return a pattern that is put into another one, where flags such as ``(?i)`` are none."""
    _pattern(f"({_pattern(value)})")
    return value


def _patterns(value: object) -> tuple[str, ...]:
    return tuple(map(_inner_pattern, _names(value)))


def _modules(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _pattern(value)
    try:
        return _names(value)
    except ValueError:
        raise ValueError("a list of names or a regular expression") from None


def _layers(value: object) -> tuple[int, ...]:
    layers = value if isinstance(value, list) else [value]
    if not all(type(each) is int for each in layers):
        raise ValueError("indices of layers")
    return tuple(layers)


def _layer_names(value: object) -> tuple[str, ...]:
    return _patterns([value] if isinstance(value, str) and value else value or [])


def _by_pattern(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read_all(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("values by patterns of names")
        return {_inner_pattern(pattern): read(each) for pattern, each in value.items()}

    return read_all


_READ: dict[str, Callable[[Any], Any]] = {
    "r": _rank,
    "lora_alpha": _alpha,
    "use_rslora": _within(instances(bool, "true or false")),
    "rank_pattern": _by_pattern(_rank),
    "alpha_pattern": _by_pattern(_alpha),
    "target_modules": _modules,
    "exclude_modules": _modules,
    "modules_to_save": _patterns,
    "layers_to_transform": _layers,
    "layers_pattern": _layer_names,
    "bias": _within(Range("'none', 'all' or 'lora_only'", _BIASES.__contains__)),
}
"""By setting, the function that reads it; ValueError: what is expected."""

_NEEDED = ("target_modules",)
"""Settings without a default."""
