"""The commands `sandbox` and `sample`."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import reader_may_leave, run_async
from shipper.errors import ConfigError

if TYPE_CHECKING:
    from shipper.sandbox.server import Access

# What the options say without a word on the command line is repeated here as text, because importing it would cost
# every `--help` the import of a web server. A test holds both together.
_DEFAULT_KEY = "sandbox-subscription-key"

_WRITE_BYTES = 1 << 20
_FIRST_LINE = "# Written by `shipper sandbox`; it is written anew at every start."


def sandbox(
    host: Annotated[str, typer.Option(help="Loopback address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = 8080,
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the events in this file, not in memory.")
    ] = None,
    account_id: Annotated[int, typer.Option(min=1, help="The affiliate account that has a report.")] = 1001,
    subscription_key: Annotated[str, typer.Option(help="The key that the gateway asks for.")] = _DEFAULT_KEY,
    write_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a configuration for this sandbox (mode 0600).")
    ] = None,
) -> None:
    """
    Run the service on this machine: no account needed, nothing leaves.

    Takes batches of events and makes the daily report of what it got.

    Prints its address and a configuration that points at it. Ctrl-C ends it.

    Example: shipper sandbox --port 0 --write-config shipper.toml
    """
    import time

    from shipper.sandbox.app import SandboxOptions
    from shipper.sandbox.server import serve
    from shipper.sandbox.store import IN_MEMORY

    options = SandboxOptions(
        host=host,
        port=port,
        account_id=account_id,
        subscription_key=subscription_key,
        store_path=str(store) if store else IN_MEMORY,
    )

    def announce(access: Access) -> None:
        if write_config is not None:
            _write_configuration(write_config, access)
        print(_welcome(access, now_seconds=time.time()), flush=True)

    async def run() -> None:
        await serve(options, clock=time.time, announce=announce)

    run_async(run)


def sample(
    count: Annotated[int, typer.Option(min=0, max=999_999_937, help="How many events.")] = 1000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same EventIds.")] = 1,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Spread over this many days before today.")] = 30,
) -> None:
    """
    Write invented events to standard output, one a line, oldest first.

    They lie in the whole days (UTC) before today: on one day, the same bytes.

    Example: shipper sample --count 10000 --seed 7 > events.ndjson
    """
    from datetime import UTC, datetime

    from shipper.sandbox.samples import sample_lines

    end = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    out = sys.stdout.buffer
    pending = bytearray()
    with reader_may_leave():
        for line in sample_lines(count, seed=seed, end=end, days=days):
            pending += line
            if len(pending) >= _WRITE_BYTES:
                out.write(pending)
                pending.clear()
        out.write(pending)
        out.flush()


def _welcome(access: Access, *, now_seconds: float) -> str:
    from shipper.sandbox.server import configuration_snippet

    return (
        f"# The sandbox listens at {access.base_url} (Ctrl-C ends it). Configuration:\n\n"
        f"{configuration_snippet(access)}\n"
        f"# One event by hand, and what has arrived:\n\n"
        f"{_curl_line(access, now_seconds=now_seconds)}\n"
        f"curl -sS {access.base_url}/_sandbox/counts\n"
    )


def _curl_line(access: Access, *, now_seconds: float) -> str:
    """Write a request that works when it is pasted into a shell."""
    from datetime import UTC, datetime

    from shipper import wire
    from shipper.sandbox.gateway import SUBSCRIPTION_KEY_HEADER
    from shipper.sandbox.samples import sample_lines

    # Its own seed, so that the event is not also the first one of `shipper sample`.
    (line,) = sample_lines(1, seed=int(now_seconds), end=datetime.fromtimestamp(now_seconds, UTC), days=1)
    headers = {
        "Content-Type": "application/json",
        "Cache-Control": "no-cache",
        "Authorization": f"Bearer {access.token}",
        SUBSCRIPTION_KEY_HEADER: access.subscription_key,
    }
    words = ["curl", "-sS", f"{access.base_url}{wire.INTAKE_PATH}"]
    for name, value in headers.items():
        words += ["-H", f"{name}: {value}"]
    body = wire.BODY_HEAD + line.rstrip() + wire.BODY_TAIL
    return shlex.join([*words, "-d", body.decode()])


def _write_configuration(path: Path, access: Access) -> None:
    """
    Put the configuration into a file of mode 0600, at one stroke, so that whoever waits for it reads all of it.

    Raises:
        ConfigError: The file is there and was written by someone else, or it cannot be written.
    """
    from shipper.sandbox.server import configuration_snippet

    try:
        if path.exists() and not path.read_bytes().startswith(_FIRST_LINE.encode()):
            raise ConfigError(
                "is there already and is not the sandbox's own; move it or name another file",
                key="--write-config",
                source=str(path),
            )
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            file.write(f"{_FIRST_LINE}\n{configuration_snippet(access)}")
        os.replace(file.name, path)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", key="--write-config", source=str(path)) from error
