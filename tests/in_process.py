"""
Runs a command in this process, from its arguments to its exit code, for a twentieth of what a process of its own costs.

It is for what a command finds, shows, writes and answers. What a process alone has is for a process: signals, a
terminal, standard streams that fail.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import sys
from _thread import interrupt_main
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from threading import Timer
from unittest.mock import patch

import structlog

import shipper.cli
from tests.e2e.driver import Result, Shipper, assert_accounted, read_state


def run(
    by: Shipper,
    *arguments: str | Path,
    settings: Mapping[str, object] | None = None,
    configured: bool = True,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    limit_s: float = 60,
) -> Result:
    """Run `shipper ARGUMENTS` with the configuration, the folder and the state of `by`; options as of its `start`."""
    words = [*arguments, *(["--config", by.config] if configured else [])]
    words += [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={value}")]
    environment = {**by.environment(), "COLUMNS": "80", **(env or {})}
    if not configured:
        del environment["SHIPPER__INTAKE__BASE_URL"]
    before = read_state(by.state) if check else None
    with chdir(by.folder), patch.dict(os.environ, environment, clear=True), _limited(limit_s):
        result = _main([str(word) for word in words])
    assert "Traceback" not in result.stderr, result.stderr
    if before is not None:
        assert_accounted(result.summary, before, read_state(by.state), is_replay="replay" in arguments)
    return result


def _main(arguments: list[str]) -> Result:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    with _called(["shipper", *arguments]), redirect_stdout(out), redirect_stderr(err), _untouched():
        try:
            shipper.cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    stdout, stderr = (stream.buffer.getvalue().decode("utf-8", "backslashreplace") for stream in (out, err))
    last = stdout.rstrip().rpartition("\n")[2]
    return Result(code, stdout, stderr, json.loads(last) if last.startswith('{"read"') else None, peak_bytes=0)


@contextmanager
def _called(words: list[str]) -> Iterator[None]:
    """Let these be the words of the command line, though the process may be one of `python -m`."""
    main = sys.modules["__main__"]
    with patch.object(sys, "argv", words), patch.object(main, "__package__", None, create=True):
        yield


@contextmanager
def _untouched() -> Iterator[None]:
    """Take back what a command sets for its process as a whole."""
    umask, thresholds, logs = os.umask(0o022), gc.get_threshold(), structlog.get_config()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

    def configure(**options: object) -> None:
        set_up(**{**options, "cache_logger_on_first_use": False})  # what a logger keeps could not be taken back

    set_up = structlog.configure
    try:
        with patch.object(structlog, "configure", configure):
            yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # the processes that a test starts would inherit what is ignored
        structlog.configure(**logs)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        os.umask(umask)


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Interrupt a command that does not end, and take that for a failure."""
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
