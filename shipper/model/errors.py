"""
The errors that a caller can see, and the exit code that each one ends the command with.

    ShipperError                 1   a defect, if nothing below fits
    ├── ConfigError              2   names the source (file, environment, flag) and the key
    ├── SourceError              2   an input that was named cannot be read
    ├── StateError               1   the state store cannot be trusted or written; stops loudly
    │   ├── StateUnwritableError 1   for now; a run that has begun tries again
    │   └── StateInUseError      5   another process holds the state directory
    ├── DeliveryGaveUpError      4   waiting was of no use; the records are pending behind the checkpoint
    └── ReportError              1   the report could not be fetched or read
"""

from __future__ import annotations


class ShipperError(Exception):
    """Base of all errors that are meant for a person to read."""

    exit_code = 1


class ConfigError(ShipperError):
    """
    A setting is missing, unknown, of the wrong type, or at odds with another one.

    Args:
        message: What is wrong and what to do, without the name of the key.
        key: The setting's dotted name, such as `batch.max_events`; empty if the error is about the whole.
        source: Where the value was written: a file's path, an environment variable, a flag.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str = "", source: str = "") -> None:
        self.message = message
        self.key = key
        self.source = source
        super().__init__(": ".join(part for part in (source, key, message) if part))


class SourceError(ShipperError):
    """An input that was named cannot be read."""

    exit_code = 2


class StateError(ShipperError):
    """The state store is damaged, foreign, newer than this program, or cannot be written."""


class StateUnwritableError(StateError):
    """
    The state store cannot be written for now, such as on a full disk; it is tried again.

    Args:
        reason: The pause that this is, a key of `pauses.ADVICE`.
    """

    def __init__(self, message: str, *, reason: str = "state_unwritable") -> None:
        super().__init__(message)
        self.reason = reason


class StateInUseError(StateError):
    """Another process holds the state directory."""

    exit_code = 5


class DeliveryGaveUpError(ShipperError):
    """
    A one-shot run ended with records pending, as waiting longer was of no use.

    Attributes:
        way_out: What to do about it, in a sentence.
        reason: The pause that this was, a key of `pauses.ADVICE`; empty = there is no advice to add.
    """

    exit_code = 4

    def __init__(self, message: str, way_out: str = "", *, reason: str = "") -> None:
        super().__init__(message)
        self.way_out = way_out or (
            "What was not delivered stays pending; run the same command again, or let it wait longer "
            "(delivery.give_up_after_seconds)"
        )
        self.reason = reason


class HeldBackError(DeliveryGaveUpError):
    """A one-shot run ended in good order because what comes next in the input must not be settled as it is."""


class ReportError(ShipperError):
    """The affiliate daily report could not be fetched or is not the document that was asked for."""


class NoServiceError(ReportError):
    """The service lets nobody in, or is away: no other report could be had just now."""


def first_of(error: BaseException) -> BaseException:
    """Take the first error out of groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
