"""
The public errors, and the exit code of each.

    ShipperError                 1   a bug, unless it is one of the following
    ├── ConfigError              2   names the source (file, environment, flag) and the key
    ├── SourceError              2   a configured input cannot be read
    ├── StateError               1   the state store is damaged or cannot be written
    │   ├── StateUnwritableError 1   temporarily; a run in progress retries
    │   └── StateInUseError      5   another process holds the state directory
    ├── DeliveryGaveUpError      4   gave up waiting; the remaining records are pending after the checkpoint
    └── ReportError              1   the report could not be fetched or read
"""

from __future__ import annotations


class ShipperError(Exception):
    """Base of all errors whose messages are meant for users."""

    exit_code = 1


class ConfigError(ShipperError):
    """
    A setting is missing, unknown, of the wrong type, or in conflict with another one.

    Args:
        message: What is wrong and what to do, without the key.
        key: The dotted key of the setting, such as `batch.max_events`; empty = the error is not about one key.
        source: The source of the value: the path of a file, an environment variable, a flag.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str = "", source: str = "") -> None:
        self.message = message
        self.key = key
        self.source = source
        super().__init__(": ".join(part for part in (source, key, message) if part))


class SourceError(ShipperError):
    """A configured input cannot be read."""

    exit_code = 2


class StateError(ShipperError):
    """The state store is damaged, not shipper's, newer than this program, or cannot be written."""


class StateUnwritableError(StateError):
    """The state store cannot be written for now, as on a full disk; `reason` is a key of `pauses.ADVICE`."""

    def __init__(self, message: str, *, reason: str = "state_unwritable") -> None:
        super().__init__(message)
        self.reason = reason


class StateInUseError(StateError):
    """Another process holds the state directory."""

    exit_code = 5


class DeliveryGaveUpError(ShipperError):
    """
    A one-shot run gave up waiting and ended with records pending.

    Attributes:
        reason: The reason of the pause, a key of `pauses.ADVICE`; empty = no further advice.
    """

    exit_code = 4

    def __init__(self, message: str, remedy: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy or (
            "Undelivered records stay pending; run the same command again, or let it wait longer "
            "(delivery.give_up_after_seconds)"
        )
        self.reason = reason


class ReportError(ShipperError):
    """The affiliate daily report could not be fetched, or is not the requested document."""


class NoServiceError(ReportError):
    """The service refuses the credentials or is unavailable, so no further report can be fetched."""


def first_of(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
