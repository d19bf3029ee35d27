"""Requests to a running shipper over the control socket of its state directory, and `shipper retry`."""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec
import typer

from shipper.cli.common import SettingsOptions, prepare, require_directory, say
from shipper.cli.signals import at_stop
from shipper.model.errors import ConfigError, DeliveryGaveUpError, StateInUseError
from shipper.system.control import SOCKET, Answer, Request, connect
from shipper.system.permissions import DENIALS, access_problem

_START_LIMIT_S: Final = 2.0  # between acquiring the lock and listening
_START_POLL_S: Final = 0.05
_ACKNOWLEDGE_LIMIT_S: Final = 10.0


def retry(*, options: SettingsOptions) -> None:
    """
    Make a running shipper that is paused retry now, instead of at its next scheduled attempt.

    Also ends a wait that the service asked for. Exit code 0: delivery has resumed, or was not paused; 4: still paused.

    Example: shipper retry --config /etc/shipper/shipper.toml
    """
    directory = require_directory(prepare(options)).state.directory
    client = connect_to_running(directory)
    if client is None:
        raise ConfigError(f"no shipper is running on {directory}; there is nothing to retry", key="state.directory")
    code, _ = send_request(client, "retry")
    raise typer.Exit(code)


def connect_to_running(directory: Path) -> socket.socket | None:
    """
    Connect to the process that holds a directory, if any.

    Raises:
        ConfigError: The permission is missing.
        StateInUseError: It cannot be reached for another reason.
    """
    from shipper.state.directory import lock_holder

    give_up_at = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            return connect(directory)
        except OSError as error:
            holder = lock_holder(directory)
            if holder is None and isinstance(error, FileNotFoundError | ConnectionRefusedError | NotADirectoryError):
                return None
            if error.errno in DENIALS and (problem := access_problem(directory / SOCKET)):
                raise ConfigError(f"{problem}; use the running shipper's user", key="state.directory") from None
            if time.monotonic() >= give_up_at:
                raise StateInUseError(
                    f"{directory} is in use by another shipper (process {holder or 'unknown'}), which cannot be "
                    f"reached over its control socket ({error.strerror or error}); wait until it ends, or stop it. "
                    "Nothing is lost meanwhile"
                ) from None
        time.sleep(_START_POLL_S)


def send_request(client: socket.socket, command: str, content: object = None) -> tuple[int, msgspec.Raw]:
    """
    Send a request and print the answers; a stop signal cancels the request.

    Returns:
        The exit code, and the content of the last answer.
    Raises:
        DeliveryGaveUpError: The other process ended before it answered.
        StateInUseError: It does not react, because it is frozen or stuck.
    """
    request = Request(command=command, content=msgspec.Raw(msgspec.json.encode(content)))

    def end() -> None:
        with suppress(OSError):  # the other process has answered already
            client.shutdown(socket.SHUT_WR)

    with at_stop(end), suppress(ConnectionError), closing(client), client.makefile("rb") as lines:
        client.settimeout(_ACKNOWLEDGE_LIMIT_S)
        try:
            client.sendall(msgspec.json.encode(request) + b"\n")
            received = lines.readline()  # sent at once, before the command is carried out
        except TimeoutError:
            raise StateInUseError(
                "the running shipper does not react: it is suspended or stuck; see shipper status, resume or restart "
                "it, and run the same command again. Nothing is lost meanwhile"
            ) from None
        client.settimeout(None)
        for line in itertools.chain([received], lines):
            if not line.endswith(b"\n"):  # truncated
                break
            answer = msgspec.json.decode(line, type=Answer)
            if answer.message:
                say(answer.message)
            if answer.code is not None:
                return answer.code, answer.content
    raise DeliveryGaveUpError(
        "the running shipper ended before it answered. Nothing is lost; run the same command again"
    )
