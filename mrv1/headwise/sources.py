"""The texts that name a head policy: a rule, a ranking, a JSON file, a pattern or a checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mrv1.environment import INT32_MAX
from mrv1.errors import ConfigError
from mrv1.headwise.policy import (
    DUO_ATTENTION_TABLE,
    FASTDEPLOY_FIELD,
    RTPURBO_FIELD,
    HeadPolicy,
    Visible,
)
from mrv1.headwise.ranking import HeadRanking


class PolicySource(NamedTuple):
    """A head policy that may depend on the model's shape."""

    of_model: Callable[[int, int], HeadPolicy]
    """Returns the policy for a number of layers and of KV heads in each layer."""
    policy: HeadPolicy | None = None
    """The policy, if it is the same for every model."""


LEAST = {"ratio": 0, "window": 1, "sink": 0, "full_layers_every": 2}  # least values, by setting
LEAST_RANKING = {"budget": 0, "context": 1, "window": 1, "sink": 0}  # likewise, after ``ranking=``
SHARES = ("ratio", "budget")  # settings that are numbers from 0 to 1


def policy_source(source: str) -> PolicySource:
    """Return the policy that a text names.

    ``ratio=0.5,window=256,sink=64`` is a rule: that share of each layer's heads streams, as in
    ``HeadPolicy.of_ratio``: the leading heads, whatever they do. ``sink`` (0) and
    ``full_layers_every`` (none) may be left out.

    ``ranking=report.json,budget=0.25`` keeps that share of the heads of a ``HeadRanking`` full,
    the most important ones; with ``context=4096`` as many as fit in that share of the cache of
    4,096 tokens. ``window`` and ``sink`` replace the ranking's.

    Other texts are a path: of the JSON file that ``HeadPolicy.save`` writes, of a folder with a
    DuoAttention pattern (half of the heads stream), or of a checkpoint whose ``config.json`` has
    FastDeploy's fields or RTPurbo's. A path that exists has precedence over a rule.

    Raises:
        ConfigError: a setting is unknown, missing, given twice or out of its range, or a file
            cannot be read or is not a policy; of ``of_model``: a checkpoint's fields are missing,
            wrong or do not fit the model.
    """
    path = Path(source)
    try:
        exists = bool(source) and path.exists()
    except OSError:  # longer than a path may be
        exists = False
    if not exists and re.match(r"\s*\w+\s*=", source):
        return _rule(source)
    if not exists:
        raise ConfigError(
            "head_policy: expected a rule such as ratio=0.5,window=256, or a file or folder, got "
            f"{source!r:.500}, which does not exist"
        )
    if not path.is_dir():
        policy = HeadPolicy.load(source)
    elif (path / DUO_ATTENTION_TABLE).is_file():
        policy = HeadPolicy.of_duo_attention(path)
    else:
        return _checkpoint(path)
    return PolicySource(lambda _num_layers, _num_kv_heads: policy, policy)


def _rule(text: str) -> PolicySource:
    """Return the policy of a rule such as ``ratio=0.5,window=256,sink=64``, or of a ranking."""
    if re.match(r"\s*ranking\s*=", text):
        first, comma, rest = text.partition(",")
        settings = _settings(rest, LEAST_RANKING, text) if comma else {}
        return _of_ranking(first.partition("=")[2].strip(), settings)
    settings = _settings(text, LEAST, text)
    missing = [name for name in ("ratio", "window") if name not in settings]
    if missing:
        raise ConfigError(f"head_policy: expected a rule with {missing[0]}=, got {text!r}")
    ratio = settings.pop("ratio")
    return PolicySource(
        lambda num_layers, num_kv_heads: HeadPolicy.of_ratio(
            num_layers, num_kv_heads, ratio, **settings
        )
    )


def _of_ranking(source: str, settings: dict[str, Any]) -> PolicySource:
    """Return the policy of a ranking, by its file or its model's name, for a budget."""
    if "budget" not in settings:
        raise ConfigError(f"head_policy: expected ranking={source},budget=, got no budget")
    policy = policy_of_ranking(source, settings)
    return PolicySource(lambda _num_layers, _num_kv_heads: policy, policy)


def policy_of_ranking(source: str, settings: Mapping[str, Any]) -> HeadPolicy:
    """Return the policy that a ranking, by its file or its model's name, gives for a budget.

    ``settings``: ``budget``, and perhaps ``context``, ``window`` and ``sink``; see
    ``policy_source``. ConfigError: one is out of its range, or the ranking cannot be read.
    """
    ranking = HeadRanking.load(source)
    streaming = Visible(
        settings.get("window", ranking.streaming.window),
        settings.get("sink", ranking.streaming.sink),
    )
    budget, context = settings["budget"], settings.get("context")
    if context is None:
        return ranking.policy(budget, streaming)
    return ranking.policy_of_cache(budget, context, streaming)


def _settings(text: str, least: dict[str, int], whole: str) -> dict[str, Any]:
    """Return a rule's settings, of which ``least`` has names and least values."""
    settings: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in least or not equals:
            raise ConfigError(
                f"head_policy: expected a file, a folder or a rule of {', '.join(least)}, got "
                f"{part.strip()!r} in {whole!r}"
            )
        if name in settings:
            raise ConfigError(f"head_policy: expected {name} once, got {whole!r}")
        settings[name] = _number(name, value, least[name])
    return settings


def _number(name: str, text: str, least: int) -> float:
    """Return the value of a rule's setting; a ConfigError if of another type or out of range."""
    most = 1 if name in SHARES else INT32_MAX
    kind = "a number" if name in SHARES else "an integer"
    try:
        value = float(text) if name in SHARES else int(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:  # false for NaN
        raise ConfigError(
            f"head_policy: expected {name}= with {kind} from {least} to {most}, got {text!r}"
        )
    return value


def _checkpoint(folder: Path) -> PolicySource:
    """Return the policy in the ``config.json`` of a checkpoint."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"head_policy: expected a DuoAttention pattern ({DUO_ATTENTION_TABLE}) or a "
            f"checkpoint in {str(folder)!r}, got {error}"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"head_policy: expected an object in {file}, got {config!r:.500}")

    def policy(num_layers: int, num_kv_heads: int) -> HeadPolicy:
        found = HeadPolicy.of_config(config, num_layers, num_kv_heads)
        if found is None:
            raise ConfigError(
                f"head_policy: expected {FASTDEPLOY_FIELD} or {RTPURBO_FIELD} in {file}, got none"
            )
        return found

    return PolicySource(policy)
