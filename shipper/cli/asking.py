"""Asks a running shipper to do something, over the control socket of its state directory; `shipper retry`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import typer

from shipper.cli.common import SettingsOptions, prepare, require_directory, say, with_settings_options
from shipper.model.errors import ConfigError, StateInUseError
from shipper.system.control import Answer, Request, connected

_START_LIMIT_S: Final = 2.0  # a process that has just taken the lock listens soon
_START_LOOK_S: Final = 0.05
_LEFT_TO_DO: Final = 4  # the exit code


@with_settings_options
def retry(*, options: SettingsOptions) -> None:
    """
    Have a running shipper that is paused try again now, instead of when it would by itself.

    It also ends a wait that the service asked for. Exit code 0: delivery has resumed, or was not paused; 4: not yet.

    Example: shipper retry --config /etc/shipper/shipper.toml
    """
    directory = require_directory(prepare(options)).state.directory
    client = running_shipper(directory)
    if client is None:
        raise ConfigError(f"no shipper runs on {directory}; there is nothing to retry", key="state.directory")
    with closing(client):
        raise typer.Exit(conversation(client, Request(command="retry")))


def running_shipper(directory: Path) -> socket.socket | None:
    """
    Connect to the process that holds a state directory; None if nobody does.

    Raises:
        StateInUseError: It cannot be asked.
    """
    from shipper.state.directory import holder_of

    give_up_at = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            return connected(directory)
        except OSError as error:
            holder = holder_of(directory)
            if holder is None and isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
                return None
            if time.monotonic() >= give_up_at:
                raise StateInUseError(
                    f"{directory} is in use by another shipper (process {holder or 'unknown'}), which cannot be asked "
                    f"over its control socket: {error.strerror or error}"
                ) from None
        time.sleep(_START_LOOK_S)


def conversation(client: socket.socket, request: Request) -> int:
    """Send a request, print what is answered, and return the exit code."""
    for answer in answers(client, request):
        if answer.message:
            say(answer.message)
        if answer.code is not None:
            return answer.code
    say("the running shipper has ended meanwhile")
    return _LEFT_TO_DO


def answers(client: socket.socket, request: Request) -> Iterator[Answer]:
    """Send a request, and yield what is answered to the last answer, or to the end of the other process."""
    try:
        client.sendall(msgspec.json.encode(request) + b"\n")
        with client.makefile("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # otherwise it was cut off
                    yield msgspec.json.decode(line, type=Answer)
    except ConnectionError:
        return
