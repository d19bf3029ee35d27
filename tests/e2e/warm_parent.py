"""
The process from which `warm_start` forks the command: `python warm_parent.py SOCKET_DESCRIPTOR`.

It imports what the commands import and runs no other code of shipper. Each request creates a child, which returns from
`_serve` and ends like the console script.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import resource
import signal
import socket
import sys
import threading
from importlib import import_module, reload
from pkgutil import walk_packages
from typing import Any

# Modules that the commands import lazily, in addition to shipper's own. Polars is excluded: it starts threads.
_LIBRARIES = (
    "anyio._backends._asyncio",
    "concurrent.futures.thread",
    "rich.console",
    "rich.progress",
    "rich.table",
    "rich.text",
    "sqlite3",
    "ssl",
    "uvloop",
    "watchfiles._rust_notify",
    "zoneinfo",
)
_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = {"dac_override": 1, "dac_read_search": 2}


def _load() -> None:
    import shipper

    for module in walk_packages(shipper.__path__, "shipper."):
        if module.name != "shipper.__main__":
            import_module(module.name)
    for name in _LIBRARIES:
        import_module(name)


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request and return it in the child; return None when the socket is closed."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        if not header:
            return None
        body = b""
        while missing := int.from_bytes(header, "big") - len(body):
            body += connection.recv(missing)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            if child := os.fork():
                os.write(writing, child.to_bytes(4, "big"))
                os._exit(0)  # the requesting process adopts the child
            connection.close()
            return {**json.loads(body), "streams": descriptors}
        os.waitpid(between, 0)
        connection.sendall(os.read(reading, 4))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _become(
    prefix: list[str], command: list[str], folder: str, environment: dict[str, str], streams: list[int]
) -> None:
    """Give this process the state that the interpreter gives the console script."""
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    _restrict(prefix)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = command
    sys.path[0] = os.path.dirname(command[0])
    sys.stdin = sys.__stdin__ = _reopened(sys.stdin, 0, "r")
    sys.stdout = sys.__stdout__ = _reopened(sys.stdout, 1, "w")
    sys.stderr = sys.__stderr__ = _reopened(sys.stderr, 2, "w")


def _restrict(prefix: list[str]) -> None:
    """Do what `prlimit --LIMIT=NUMBER --` or `setpriv --bounding-set -CAPABILITIES ...` does before executing."""
    match prefix:
        case ["prlimit", limit, "--"]:
            name, number = limit.removeprefix("--").split("=")
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (int(number), int(number)))
        case ["setpriv", "--bounding-set", names, *_]:
            libc, lost = ctypes.CDLL(None, use_errno=True), 0
            for name in names.split(","):
                number = _CAPABILITIES[name.removeprefix("-")]
                lost |= 1 << number
                assert libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0, "a capability cannot be dropped"
            header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
            assert libc.capget(header, sets) == 0
            for place in range(3):  # effective, permitted and inheritable; the first 32 capabilities
                sets[place] &= ~lost
            assert libc.capset(header, sets) == 0


def _read_environment() -> None:
    """Rerun code that reads the environment on import, and shorten the constants named in the environment."""
    reload(sys.modules["shipper.system.crash_points"])
    for constant in os.environ.get("SHIPPER_TEST_SECONDS", "").split():
        name, _, seconds = constant.partition("=")
        module, _, name = name.rpartition(".")
        assert hasattr(sys.modules[module], name), name
        setattr(sys.modules[module], name, float(seconds))


def _reopened(stream: io.TextIOWrapper, descriptor: int, mode: str) -> io.TextIOWrapper:
    """Open a standard stream as the interpreter does, with the encoding of the previous stream."""
    buffer = os.fdopen(descriptor, f"{mode}b", closefd=False)
    buffer.raw.name = stream.name
    by_line = descriptor == 2 or buffer.raw.isatty()
    again = io.TextIOWrapper(buffer, stream.encoding, stream.errors, newline="\n", line_buffering=by_line)
    again.mode = mode
    return again


def _end(code: int) -> None:
    """End as the interpreter does, but without its teardown, which takes as long as a small command."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    # Added by the interpreter to an environment without a locale.
    LOCALE = {name: value for name, value in os.environ.items() if name.startswith("LC_")}
    _load()
    REQUEST = _serve(socket.socket(fileno=int(sys.argv[1])))
    if REQUEST is not None:
        REQUEST["environment"] = LOCALE | REQUEST["environment"]
        _become(**REQUEST)
        _read_environment()
        from shipper.cli import main

        try:
            sys.exit(main())
        except SystemExit as ended:
            if type(ended.code) is int:
                _end(ended.code)
            raise
