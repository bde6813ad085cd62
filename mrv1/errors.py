"""The errors mrv1 raises on purpose: each is an ``Mrv1Error`` and the builtin it resembles."""

from __future__ import annotations

from typing import Self


def short(value: object, limit: int = 60) -> str:
    """Return the repr of ``value``, cut to ``limit`` characters; no value makes it fail."""
    try:
        text = repr(value)
    except ValueError:  # more digits than sys.get_int_max_str_digits() allows
        text = f"{type(value).__name__} of too many digits to print"
    except RecursionError:
        text = f"{type(value).__name__} of too many levels to print"
    except Exception:  # of any type: the class is a caller's
        text = f"{type(value).__name__} that cannot be printed"
    return text if len(text) <= limit else f"{text[:limit]}..."


class Mrv1Error(Exception):
    """Base of every error mrv1 raises on purpose."""


class ConfigError(Mrv1Error, ValueError):
    """A configuration, checkpoint or option is wrong; nothing has been started."""


class UnsupportedDeviceError(Mrv1Error, RuntimeError):
    """The device is missing or lacks a feature; the message gives the cause and an alternative."""


class CapacityError(Mrv1Error, RuntimeError):
    """A capacity (blocks, slots, memory) is too small; the message says how to raise it."""


class RequestError(Mrv1Error, ValueError):
    """One request is wrong and fails alone; the message names field, expected and given value."""

    @classmethod
    def caused_by(cls, error: Exception, hook: str) -> Self:
        """Return the error of a request whose ``hook`` (code of the caller) raised ``error``."""
        failure = cls(f"{hook}: {error!r}")
        failure.__cause__ = error
        return failure


class StepError(Mrv1Error, RuntimeError):
    """A launched step failed.

    Attributes:
        step_id: the step that failed.
        req_ids: the requests of the step, as the plan names them.
        device_lost: whether a kernel failed; this process can then no longer use the GPU.
    """

    def __init__(
        self,
        message: str,
        *,
        step_id: int,
        req_ids: tuple[str | tuple[str, int], ...] = (),
        device_lost: bool = False,
    ) -> None:
        super().__init__(f"step {step_id} ({len(req_ids)} requests): {message}")
        self.step_id = step_id
        self.req_ids = req_ids
        self.device_lost = device_lost
