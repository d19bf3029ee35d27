"""
Runs a command in this process, from its arguments to its exit code, in a twentieth of the time of a new process.

Use it for what a command reads, prints and writes. Signals, terminals, failing standard streams and memory need a real
process.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import sys
from _thread import interrupt_main
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from pathlib import Path
from threading import Thread, Timer
from typing import Any, NamedTuple
from unittest.mock import patch

import structlog
import typer.main
from typer import Typer

import shipper.cli
from shipper.cli import app
from shipper.status import logs


class Ended(NamedTuple):
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


def run(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], stdin: bytes | None, limit_s: float
) -> Ended:
    """
    Run `shipper ARGUMENTS` in a folder and an environment.

    Args:
        environment: `SHIPPER_TEST_SECONDS` shortens constants, see `e2e.driver.Shipper`.
        stdin: Bytes to pipe in; None = /dev/null.
    """
    with (
        chdir(folder),
        patch.dict(os.environ, environment, clear=True),
        _shortened(environment.get("SHIPPER_TEST_SECONDS", "")),
        _fed(stdin),
        _limited(limit_s),
    ):
        return _main([*arguments])


def _main(arguments: list[str]) -> Ended:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    with _called(["shipper", *arguments]), redirect_stdout(out), redirect_stderr(err), _untouched(), _built_once():
        try:
            shipper.cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, *(stream.buffer.getvalue().decode("utf-8", "backslashreplace") for stream in (out, err)))


_COMMAND_LINE, _GET_COMMAND = app.command_line, typer.main.get_command


@cache
def _command_line(first: str) -> Typer:
    return _COMMAND_LINE([first])


@cache
def _get_command(declared: Typer) -> Any:
    return _GET_COMMAND(declared)


@contextmanager
def _built_once() -> Iterator[None]:
    """Keep what is made of the declarations of a command, which takes a tenth of a small one, for its next run."""
    with (
        patch.object(app, "command_line", lambda arguments: _command_line("".join(arguments[:1]))),
        patch.object(typer.main, "get_command", _get_command),
    ):
        yield


@contextmanager
def _called(words: list[str]) -> Iterator[None]:
    """Replace `sys.argv`, even if the process was started by `python -m`."""
    main = sys.modules["__main__"]
    with patch.object(sys, "argv", words), patch.object(main, "__package__", None, create=True):
        yield


@contextmanager
def _shortened(constants: str) -> Iterator[None]:
    with ExitStack() as patched:
        for constant in constants.split():
            name, _, seconds = constant.partition("=")
            patched.enter_context(patch(name, float(seconds)))
        yield


@contextmanager
def _fed(data: bytes | None) -> Iterator[None]:
    """Make descriptor 0 a pipe that yields these bytes and then end of file."""
    reading, writing = os.pipe() if data is not None else (os.open(os.devnull, os.O_RDONLY), None)
    before = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    writer = Thread(target=_write, args=(writing, data), daemon=True)
    if writing is not None:
        writer.start()
    try:
        with open(0, closefd=False) as stdin, patch.object(sys, "stdin", stdin):
            yield
    finally:
        os.dup2(before, 0)
        os.close(before)
        if writing is not None:
            writer.join()


def _write(descriptor: int, data: bytes) -> None:
    with suppress(BrokenPipeError), open(descriptor, "wb", buffering=0) as out:
        left = memoryview(data)
        while left:
            left = left[out.write(left) :]


@contextmanager
def _untouched() -> Iterator[None]:
    """Undo what a command changes process-wide."""
    umask, thresholds, set_up_before = os.umask(0o022), gc.get_threshold(), structlog.get_config()
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def configure(**options: object) -> None:
        set_up(**{**options, "cache_logger_on_first_use": False})  # a cached logger could not be reset

    set_up = structlog.configure
    try:
        with (
            patch.object(structlog, "configure", configure),
            patch.object(logs, "_filter", logs._Filter()),  # counts the lines of a process
            patch.object(gc, "freeze"),  # would unfreeze what the tests have frozen
            patch.object(os, "_exit", _no),
        ):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # child processes would inherit ignored signals
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)
        structlog.configure(**set_up_before)
        gc.set_threshold(*thresholds)
        os.umask(umask)


def _no(code: int) -> None:
    raise AssertionError(f"the process would end at once, with {code}: such a command needs one of its own")


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Interrupt a command that exceeds the time limit, and fail."""
    is_late = False

    def interrupt() -> None:
        nonlocal is_late
        is_late = True
        interrupt_main()

    watch = Timer(limit_s, interrupt)
    watch.daemon = True
    watch.start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_late:
            raise
    finally:
        watch.cancel()
    assert not is_late, f"did not end within {limit_s} s"
