"""
The command line: start and end of the process. The commands are in `app`.

Only this package prints or ends the process, and only this package and `library` read the wall clock. Diagnostics go to
stderr, and only the requested output to stdout.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import signal
import sys
from typing import Final, NoReturn, TextIO

from shipper.cli.signals import ignore_signals, record_signals
from shipper.model.errors import ShipperError, first_of
from shipper.model.printable import escape_unencodable
from shipper.system.memory import call_c_library, share_one_arena
from shipper.system.work import work_items

# New objects between two garbage collections: more than a start creates. Neither imported modules nor records contain
# many cycles, and the default thresholds cost a fifth of the start.
_GC_THRESHOLDS: Final = (100_000, 20, 20)
_PR_SET_DUMPABLE: Final = 4


class _StructlogWithoutRich:
    """Keeps structlog from importing rich, a sixth of a start, for tracebacks that shipper does not print."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        structlog = sys.modules.get("structlog")
        if fullname == "rich" and structlog is not None and not hasattr(structlog, "get_logger"):
            raise ModuleNotFoundError(name=fullname)


def _open_standard_descriptors() -> None:
    """Open closed standard descriptors on /dev/null, so that no database or socket becomes standard error."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w")


def _buffered(stream: TextIO) -> TextIO:
    """
    Undo `python -u` and PYTHONUNBUFFERED: unbuffered, Python treats a partial write to a pipe as complete.

    The new stream is line-buffered. The interpreter's own stream is not changed, as other code may hold it.
    """
    if not isinstance(stream, io.TextIOWrapper) or not isinstance(stream.buffer, io.RawIOBase):
        return stream
    return open(stream.fileno(), "w", buffering=1, encoding=stream.encoding, errors=stream.errors, closefd=False)


def _protect_memory() -> None:
    """
    Prevent core dumps, and prevent other processes of the user from reading our memory.

    It contains secrets and records. `SHIPPER_DUMPABLE=1` disables this protection for debuggers and profilers.
    """
    if os.environ.get("SHIPPER_DUMPABLE", "") in {"", "0"}:
        call_c_library("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def prepare_process() -> None:
    """Set up the process before anything else is imported."""
    gc.set_threshold(*_GC_THRESHOLDS)
    os.umask(0o077)
    _protect_memory()
    share_one_arena()
    _open_standard_descriptors()
    sys.meta_path.insert(0, _StructlogWithoutRich())
    sys.stdout, sys.stderr = _buffered(sys.stdout), _buffered(sys.stderr)
    codecs.register_error("shipper", escape_unencodable)  # names of files, in a locale without their characters
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="shipper")


def main() -> NoReturn:
    """Run the command line and exit with one of the documented exit codes."""
    record_signals()
    try:
        _run()
    except KeyboardInterrupt:  # during the import of a command that does not ship
        sys.exit(128 + signal.SIGINT)
    except SystemExit as ending:
        ignore_signals()
        if work_items() and isinstance(ending.code, int):
            os._exit(ending.code)  # the interpreter would wait for a thread that hangs, for example in a read
        raise


def _run() -> NoReturn:
    prepare_process()
    from shipper.cli.app import command_line
    from shipper.cli.common import say, tolerate_closed_stdout

    if sys.argv[1:2] == ["help"]:
        sys.argv[1:] = [*sys.argv[2:], "--help"]
    try:
        try:
            with tolerate_closed_stdout():
                command_line(sys.argv[1:])()
        finally:
            with tolerate_closed_stdout():
                sys.stdout.flush()
        code = 0
    except* ShipperError as group:
        error = first_of(group)
        assert isinstance(error, ShipperError)
        say(f"shipper: {error}")
        code = error.exit_code
    except* MemoryError:
        say(
            "shipper: there is not enough memory: raise its limit (ulimit -v), or lower batch.max_bytes, "
            "input.max_record_bytes or delivery.max_concurrency. The next start continues at the checkpoint"
        )
        code = 1
    except* RuntimeError as group:
        if "start new thread" not in str(first_of(group)):
            raise
        say(
            "shipper: no more threads can be started: raise the limit of processes (ulimit -u, TasksMax= of the unit, "
            "or that of the container). The next start continues at the checkpoint"
        )
        code = 1
    finally:
        gc.freeze()  # skip the final garbage collection
    sys.exit(code)
