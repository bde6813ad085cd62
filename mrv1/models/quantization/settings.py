"""Settings of a quantization in ``config.json``, read with errors that name them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mrv1.errors import ConfigError, short


class Settings:
    """A JSON object of a configuration, and its name in errors."""

    def __init__(self, name: str, values: object) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{name}: expected an object, got {short(values)}")
        self.name = name
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401 - JSON
        """Return a setting, or ``default`` if it is missing or null."""
        value = self._values.get(key)
        return default if value is None else value

    def error(self, key: str, expected: str) -> ConfigError:
        """Return the error for a setting that is not as expected."""
        return ConfigError(f"{self.name}.{key}: expected {expected}, got {short(self.get(key))}")

    def choice(self, key: str, choices: Sequence[Any], default: Any = None) -> Any:  # noqa: ANN401
        """Return a setting that is one of ``choices``."""
        value = self.get(key, default)
        if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
            raise self.error(key, f"one of {', '.join(map(repr, choices))}")
        return value

    def count(self, key: str) -> int:
        """Return a setting that is a positive integer."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a positive integer")
        return value

    def group_size(self, default: int) -> int:
        """Return the inputs of a group, ``group_size``; -1 = all."""
        size = self.get("group_size", default)
        if type(size) is not int or (size < 1 and size != -1):
            raise self.error("group_size", "a positive integer, or -1 for all inputs")
        return size

    def pair(self, key: str) -> tuple[int, int]:
        """Return a setting that is two positive integers."""
        value = self.get(key)
        if (
            not isinstance(value, Sequence)
            or isinstance(value, str)
            or len(value) != 2
            or not all(type(each) is int and each > 0 for each in value)
        ):
            raise self.error(key, "two positive integers")
        return value[0], value[1]

    def names(self, key: str) -> tuple[str, ...]:
        """Return a setting that is a list of texts."""
        value = self.get(key, ())
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(key, "a list of names")
        if not all(isinstance(each, str) for each in value):
            raise self.error(key, "a list of names")
        return tuple(value)

    def part(self, key: str) -> Settings | None:
        """Return a setting that is an object itself; None = missing or null."""
        value = self.get(key)
        return None if value is None else Settings(f"{self.name}.{key}", value)

    def parts(self, key: str) -> dict[str, Settings]:
        """Return the objects of a setting that is an object of objects."""
        every = self.part(key)
        if every is None:
            return {}
        return {name: Settings(f"{every.name}.{name}", every.get(name)) for name in every._values}

    def refuse(self, *keys: str) -> None:
        """Raise if one of the settings has a value that would mean something."""
        for key in keys:
            if self.get(key):
                raise self.error(key, "none")


def pattern(name: str, text: str) -> re.Pattern[str]:
    """Return a compiled pattern; ConfigError: it is not valid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{name}: expected a regular expression, got {text!r}: {error}"
        ) from error
