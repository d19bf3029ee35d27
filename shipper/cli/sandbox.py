"""The command `sandbox`."""

from __future__ import annotations

import shlex
import time
from binascii import crc32
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from shipper.cli.commands import flag, option
from shipper.cli.common import plain, run_async
from shipper.cli.config import toml_value
from shipper.model.errors import ConfigError
from shipper.sandbox.options import (
    AnswerShape,
    CallLimit,
    Figures,
    Profile,
    Rejection,
    Repeats,
    RetryAfter,
    SandboxOptions,
)
from shipper.system.files import replace_file

if TYPE_CHECKING:
    from shipper.sandbox.faults import FaultScript
    from shipper.sandbox.server import Access
    from shipper.sandbox.service import RequestEntry

_HEADER: Final = b"# Written by `shipper sandbox`"
_answers = partial(option, rich_help_panel="Answers")
_limits = partial(option, rich_help_panel="Limits and waits")
_access = partial(option, rich_help_panel="Keys, tokens and clocks")
_faults = partial(option, rich_help_panel="Faults")


class Flags(NamedTuple):
    """The options of the command; those named like a field of `SandboxOptions` set that field."""

    host: Annotated[str, option("ADDRESS", "Loopback address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("N", "The port; 0 = any free one.", min=0, max=65535)] = 8080
    output: Annotated[
        Path | None,
        option("FILE", "Write a configuration for this sandbox (mode 0600).", "--output", "-o", "--write-config"),
    ] = None
    store: Annotated[Path | None, option("FILE", "Store events in this file instead of in memory.")] = None
    blackhole: Annotated[bool, flag("Only count events; do not validate or store them.", "--blackhole")] = False
    verbose: Annotated[bool, flag("Log each request to stderr, on one line.", "--verbose", "-v")] = False

    profile: Annotated[
        Profile, _answers("NAME", "document: the documented rules; strict: also publicly known rules of such services.")
    ] = "document"
    rejection: Annotated[
        Rejection, _answers("WHAT", "A batch with bad events: partial: refuse only these; whole: refuse all events.")
    ] = "partial"
    answer: Annotated[
        AnswerShape, _answers("FORM", "counts: 202; created: 201; empty: 200; no-content: 204; per-event: 207.")
    ] = "counts"
    repeats: Annotated[Repeats, _answers("WHAT", "ignore, reject or accept a repeated EventId.")] = "ignore"
    account_id: Annotated[int, _answers("N", "The affiliate account that has a report.", min=1, max=2**63 - 1)] = 1001
    figures: Annotated[
        Figures, _answers("WHAT", "Figures in the report besides registrations: received: zeros; seeded: invented.")
    ] = "received"
    seed: Annotated[int, _answers("N", "Seed for invented figures, jitter and random faults.")] = 1

    rate_limit: Annotated[
        str | None, _limits("CALLS/SECONDS", "Limit of requests; above it: 429 with Retry-After.")
    ] = None
    quota: Annotated[str | None, _limits("CALLS/SECONDS", "Quota of requests; above it: 403 with Retry-After.")] = None
    token_limit: Annotated[str, _limits("CALLS/SECONDS", "Limit of requests to the token endpoint; above it: 429.")] = (
        "60/60"
    )
    retry_after: Annotated[RetryAfter, _limits("FORM", "Form of Retry-After: seconds or date.")] = "seconds"
    max_body_bytes: Annotated[int, _limits("N", "Size limit of a request body; above it: 413.", min=1)] = (
        2 * 1024 * 1024
    )
    accept_gzip: Annotated[
        bool, flag("Accept gzip bodies instead of answering 415.", "--accept-gzip", rich_help_panel="Limits and waits")
    ] = False
    latency_seconds: Annotated[float, _limits("S", "Delay before each answer.", min=0, max=3600)] = 0.0
    jitter_seconds: Annotated[float, _limits("S", "Maximum random addition to the delay.", min=0, max=3600)] = 0.0

    subscription_key: Annotated[str, _access("KEY", "The primary key.")] = "sandbox-subscription-key"
    secondary_key: Annotated[str, _access("KEY", "The secondary key.")] = "sandbox-secondary-key"
    token_lifetime_seconds: Annotated[
        int, _access("S", "Lifetime of tokens from the token endpoint.", min=1, max=10**9)
    ] = 3600
    token_skew_seconds: Annotated[
        float, _access("S", "How far the token endpoint's clock is ahead of this machine's.", min=-(10**9), max=10**9)
    ] = 0.0
    clock_offset_seconds: Annotated[
        float, _access("S", "How far the service's clock is ahead of this machine's.", min=-(10**9), max=10**9)
    ] = 0.0

    faults: Annotated[Path | None, _faults("FILE", "A fault script, TOML or (*.json) JSON.")] = None
    fault: Annotated[list[str] | None, _faults("RULE", "One fault rule, such as 'reset every=7 when=after'.")] = None
    chaos: Annotated[float, _faults("SHARE", "Share of requests that fail, from 0 to 1.", min=0, max=1)] = 0.0

    def options(self) -> SandboxOptions:
        shared = {name: value for name, value in self._asdict().items() if name in SandboxOptions.__struct_fields__}
        for name in ("rate_limit", "quota", "token_limit"):
            if shared[name] is not None:
                shared[name] = CallLimit.parse(shared[name], key=f"--{name.replace('_', '-')}")
        if self.store is not None:
            shared["store_path"] = str(self.store)
        return SandboxOptions(**shared)


def sandbox(flags: Flags) -> None:
    """
    Simulate the service on this machine: no account is needed, and no data leaves the machine.

    It checks keys and tokens, accepts batches of events, generates the daily report, and fails on demand. It
    prints its address and a configuration that points at it. Ctrl-C ends it.

    Example: run the first line in one terminal and the others in a second one:

    \b
      shipper sandbox -o shipper.toml --figures seeded
      shipper sample --count 100000 -o events.ndjson
      shipper backfill events.ndjson
      shipper report 1001 $(date +%Y-%m-01) $(date +%F)
      curl -sS http://127.0.0.1:8080/_sandbox/counts

    Faults: slow, limited, every 7th connection reset after its batch was stored, requests 5 to 9 unavailable:

    \b
      shipper sandbox -o shipper.toml --latency-seconds 0.1 --rate-limit 100/10 \\
        --fault 'reset every=7 when=after' \\
        --fault 'status status=503 requests=5-9'

    Effects of --fault: status, html, delay, hang, reset, truncate, drip, rotate_key, chance. When: requests, every,
    probability, times, operation (intake, report, token, any). At run time: PUT /_sandbox/faults.

    GET /_sandbox/ lists all controls.
    """
    from shipper.sandbox.server import serve

    options = flags.options()
    script = _script(flags)

    def announce(access: Access) -> None:
        where = "Configuration" if flags.output is None else _write_configuration(flags.output, access)
        print(_welcome(access, where, now_seconds=time.time() + flags.clock_offset_seconds), flush=True)

    observe = _log_requests() if flags.verbose else None
    run_async(lambda: serve(options, script, clock=time.time, announce=announce, observe=observe))


def _log_requests() -> Callable[[RequestEntry], None]:
    """Return a function that logs requests: only the path of the address, no headers, no body."""
    import structlog

    from shipper.status.logs import configure_logs

    configure_logs("debug", "auto", now=time.monotonic)  # only level debug writes all lines of an event
    log = structlog.get_logger("sandbox")

    def observe(entry: RequestEntry) -> None:
        optional = {name: getattr(entry, name) for name in ("events", "duplicates", "rejected", "fault")}
        log.debug(
            "request",
            method=entry.method,
            path=entry.path,
            status=entry.status,
            **{name: value for name, value in optional.items() if value},
            seconds=entry.seconds,
        )

    return observe


def _script(flags: Flags) -> FaultScript:
    """Combine the rules of the file, the command line and --chaos."""
    from shipper.sandbox.faults import Chance, FaultScript, load_script, read_rule

    script = load_script(flags.faults) if flags.faults else FaultScript(seed=flags.seed)
    if not 0 <= flags.chaos <= 1:  # NaN
        raise ConfigError(f"{flags.chaos} is not a share from 0 to 1", key="--chaos", source="sandbox")
    rules = [*script.fault, *(read_rule(rule, source="--fault") for rule in flags.fault or ())]
    if flags.chaos:
        rules.append(Chance(operation="any", probability=flags.chaos))
    return FaultScript(seed=script.seed, fault=rules)


def _welcome(access: Access, where: str, *, now_seconds: float) -> str:
    from shipper.sandbox.server import configuration_snippet

    return (
        f"# The sandbox listens at {access.base_url} (Ctrl-C ends it). {plain(where)}:\n\n"
        f"{configuration_snippet(access)}\n"
        f"# Send an event by hand, get a new token, show what has arrived, and list all controls:\n\n"
        f"{_event_command(access, now_seconds=now_seconds)}\n"
        f"{_token_command(access)}\n"
        f"curl -sS {access.base_url}/_sandbox/counts\n"
        f"curl -sS {access.base_url}/_sandbox/\n"
    )


def _event_command(access: Access, *, now_seconds: float) -> str:
    from datetime import UTC, datetime

    from shipper.model import wire
    from shipper.sandbox.gateway import SUBSCRIPTION_KEY_HEADER
    from shipper.sandbox.samples import sample_lines

    # Use another seed, so that the event is not also the first one of `shipper sample`.
    (line,) = sample_lines(1, seed=int(now_seconds), end=datetime.fromtimestamp(now_seconds, UTC), days=1)
    headers = [
        "Content-Type: application/json",
        "Cache-Control: no-cache",
        f"Authorization: Bearer {access.token}",
        f"{SUBSCRIPTION_KEY_HEADER}: {access.subscription_key}",
    ]
    command = ["curl", "-sS", f"{access.base_url}{wire.INTAKE_PATH}"]
    for header in headers:
        command += ["-H", header]
    return shlex.join([*command, "-d", (wire.BODY_HEAD + line.rstrip() + wire.BODY_TAIL).decode()])


def _token_command(access: Access) -> str:
    from urllib.parse import urlencode

    from shipper.sandbox.tokens import CLIENT_ID, CLIENT_SECRET, DEFAULT_SCOPE, TOKEN_PATH

    form = {
        "grant_type": "client_credentials",
        "client_id": CLIENT_ID,
        "client_secret": CLIENT_SECRET,
        "scope": DEFAULT_SCOPE,
    }
    return shlex.join(["curl", "-sS", f"{access.base_url}{TOKEN_PATH}", "-d", urlencode(form)])


def _write_configuration(path: Path, access: Access) -> str:
    """
    Write the configuration atomically to a file with mode 0600, unless the file was changed after a sandbox wrote it.

    Returns:
        The text to show above the configuration.
    Raises:
        ConfigError: The file exists and was not written by a sandbox, or it cannot be written.
    """
    from shipper.sandbox.server import configuration_snippet

    try:
        before = path.read_bytes() if path.exists() else None
        if before is not None and not before.startswith(_HEADER):
            raise ConfigError(
                "exists and was not written by the sandbox; move it or choose another file",
                key="--output",
                source=str(path),
            )
        first_line, _, rest = (before or b"").partition(b"\n")
        if before is not None and first_line != _first_line(rest):
            return (
                f"{path.absolute()}\n# was changed after a sandbox wrote it, so it is not overwritten. To keep using "
                "it, make\n# sure that it has these sections; for a new one, delete it and restart the sandbox"
            )
        # Not the default directory, which may contain the state of a production shipper.
        state = toml_value(path.with_name("shipper-state").absolute())
        text = f"{configuration_snippet(access)}\n[state]\ndirectory = {state}\n".encode()
        replace_file(path, _first_line(text) + b"\n" + text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", key="--output", source=str(path)) from error
    return f"Configuration, written to {path.absolute()}"


def _first_line(rest: bytes) -> bytes:
    """Return the first line of a configuration file, whose checksum shows whether the rest was changed."""
    return b"%b; written anew at every start, unless it was changed (%08x)." % (_HEADER, crc32(rest))
