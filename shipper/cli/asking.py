"""Asks a running shipper to do something, over the control socket of its state directory; `shipper retry`."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec
import typer

from shipper.cli.common import SettingsOptions, prepare, require_directory, say, with_settings_options
from shipper.cli.signals import at_stop
from shipper.model.errors import ConfigError, DeliveryGaveUpError, StateInUseError
from shipper.system.control import Answer, Request, connected

_START_LIMIT_S: Final = 2.0  # a process that has just taken the lock listens soon
_START_LOOK_S: Final = 0.05


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
    code, _ = conversation(client, "retry")
    raise typer.Exit(code)


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
                    f"over its control socket ({error.strerror or error}); wait for its end, or stop it. Nothing is "
                    "lost meanwhile"
                ) from None
        time.sleep(_START_LOOK_S)


def conversation(client: socket.socket, command: str, content: object = None) -> tuple[int, msgspec.Raw]:
    """
    Send a request and print what is answered; a stop asks the other process to end it early.

    Returns:
        The exit code, and the content of the last answer.
    Raises:
        DeliveryGaveUpError: The other process has ended before it.
    """
    request = Request(command=command, content=msgspec.Raw(msgspec.json.encode(content)))

    def end() -> None:
        with suppress(OSError):  # it has answered
            client.shutdown(socket.SHUT_WR)

    with at_stop(end), suppress(ConnectionError), closing(client), client.makefile("rb") as lines:
        client.sendall(msgspec.json.encode(request) + b"\n")
        for line in lines:
            if not line.endswith(b"\n"):  # it was cut off
                break
            answer = msgspec.json.decode(line, type=Answer)
            if answer.message:
                say(answer.message)
            if answer.code is not None:
                return answer.code, answer.content
    raise DeliveryGaveUpError(
        "the running shipper has ended before it could answer. Nothing is lost; run the same command again"
    )
