"""
The command line: how the process begins and ends. The commands are in `app`.

Only in this package is anything printed, or the process ended; and only here and in `library` is the wall's clock
read. Diagnostics go to stderr; stdout carries only what was asked for.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from contextlib import suppress
from typing import Final, NoReturn, TextIO

from shipper.cli.signals import ignore_signals, note_signals
from shipper.model.errors import ShipperError, first_of
from shipper.system.memory import keep_memory_together
from shipper.system.work import pieces

# New objects between two collections: more than a start makes. What is imported is no garbage, nor is what flows: both
# have next to no cycles, and looking for them as often as by default costs a fifth of the start.
_GC_THRESHOLDS: Final = (100_000, 20, 20)
_PR_SET_DUMPABLE: Final = 4
_EXTRAS: Final = ("rich",)


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors on /dev/null; a database or socket must not become standard error."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _buffered(stream: TextIO) -> TextIO:
    """
    Undo `python -u` and PYTHONUNBUFFERED: unbuffered, Python takes a write that a pipe took in part for a whole one.

    Lines of text are still written as they end. The interpreter's own stream stays as it is, as others may have it.
    """
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(stream.buffer, io.RawIOBase):
        return stream
    return open(stream.fileno(), "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def _forbid_looking_into_memory() -> None:
    """
    Prevent core dumps, and keep other processes of the user from reading this one's memory.

    It holds secrets and records. `SHIPPER_DUMPABLE=1` leaves this out, for debuggers and profilers.
    """
    if sys.platform != "linux" or os.environ.get("SHIPPER_DUMPABLE", "") not in {"", "0"}:
        return
    with suppress(ImportError, OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def prepare_process() -> None:
    """Set up the process before anything else is loaded."""
    gc.set_threshold(*_GC_THRESHOLDS)
    os.umask(0o077)
    _forbid_looking_into_memory()
    keep_memory_together()
    _open_standard_descriptors()
    sys.stdout, sys.stderr = _buffered(sys.stdout), _buffered(sys.stderr)


def main() -> NoReturn:
    """Run the command line and end the process with one of the documented exit codes."""
    note_signals()
    try:
        _run()
    except KeyboardInterrupt:  # while a command was loaded that has nothing to tidy up
        sys.exit(128 + signal.SIGINT)
    except SystemExit as ending:
        ignore_signals()
        if pieces() and isinstance(ending.code, int):
            os._exit(ending.code)  # a thread hangs, such as in a read, and the interpreter would wait for it
        raise


def _run() -> NoReturn:
    prepare_process()
    from shipper.cli.app import command_line
    from shipper.cli.common import reader_may_leave, say

    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    try:
        with reader_may_leave():
            command_line(sys.argv[1:])()
        code = 0
    except* ShipperError as group:
        error = first_of(group)
        assert isinstance(error, ShipperError)
        say(f"shipper: {error}")
        code = error.exit_code
    finally:
        with suppress(OSError), reader_may_leave():
            sys.stdout.flush()
        gc.freeze()  # what is left ends with the process, unlooked at
    sys.exit(code)
