"""The command `sandbox`."""

from __future__ import annotations

import shlex
import time
from binascii import crc32
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shipper.cli.common import plain, run_async
from shipper.cli.config import toml_value
from shipper.model.errors import ConfigError
from shipper.sandbox.options import (
    IN_MEMORY,
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

_DEFAULT: Final = SandboxOptions()
_OWN: Final = b"# Written by `shipper sandbox`"


def _option(*spellings: str, metavar: str, text: str, panel: str = "", **bounds: Any) -> Any:
    return typer.Option(*spellings, metavar=metavar, help=text, rich_help_panel=panel or None, **bounds)


_ANSWERS: Final = "Answers"
_LIMITS: Final = "Limits and waits"
_ACCESS: Final = "Keys, tokens and clocks"
_FAULTS: Final = "Faults"


def sandbox(
    host: Annotated[str, _option("--host", metavar="ADDRESS", text="Loopback address to listen on.")] = _DEFAULT.host,
    port: Annotated[
        int, _option("--port", metavar="N", text="The port; 0 = any free one.", min=0, max=65535)
    ] = _DEFAULT.port,
    output: Annotated[
        Path | None,
        _option(
            "--output",
            "-o",
            "--write-config",
            metavar="FILE",
            text="Write a configuration for this sandbox there (mode 0600).",
        ),
    ] = None,
    store: Annotated[
        Path | None, _option("--store", metavar="FILE", text="Keep the events in this file, not in memory.")
    ] = None,
    blackhole: Annotated[
        bool, typer.Option("--blackhole", help="Count events; neither validate nor keep them.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each request to stderr, on one line.")] = False,
    profile: Annotated[
        Profile,
        _option(
            "--profile",
            metavar="NAME",
            text="document: the documented rules; strict: also what is publicly known.",
            panel=_ANSWERS,
        ),
    ] = _DEFAULT.profile,
    rejection: Annotated[
        Rejection,
        _option(
            "--rejection",
            metavar="WHAT",
            text="partial: a bad event is refused, the others are accepted; whole: all are refused.",
            panel=_ANSWERS,
        ),
    ] = _DEFAULT.rejection,
    answer: Annotated[
        AnswerShape,
        _option(
            "--answer",
            metavar="FORM",
            text="counts: 202; created: 201; empty: 200; no-content: 204; per-event: 207.",
            panel=_ANSWERS,
        ),
    ] = _DEFAULT.answer,
    repeats: Annotated[
        Repeats,
        _option("--repeats", metavar="WHAT", text="ignore, reject or accept a repeated EventId.", panel=_ANSWERS),
    ] = _DEFAULT.repeats,
    account_id: Annotated[
        int,
        _option(
            "--account-id",
            metavar="N",
            text="The affiliate account that has a report.",
            panel=_ANSWERS,
            min=1,
            max=2**63 - 1,
        ),
    ] = _DEFAULT.account_id,
    figures: Annotated[
        Figures,
        _option(
            "--figures",
            metavar="WHAT",
            text="Figures of the report besides registrations: received: zero; seeded: invented.",
            panel=_ANSWERS,
        ),
    ] = _DEFAULT.figures,
    seed: Annotated[
        int,
        _option("--seed", metavar="N", text="For invented figures, jitter, and faults by chance.", panel=_ANSWERS),
    ] = _DEFAULT.seed,
    rate_limit: Annotated[
        str | None,
        _option("--rate-limit", metavar="CALLS/SECONDS", text="Above it: 429 with Retry-After.", panel=_LIMITS),
    ] = None,
    quota: Annotated[
        str | None,
        _option("--quota", metavar="CALLS/SECONDS", text="Above it: 403 with Retry-After.", panel=_LIMITS),
    ] = None,
    token_limit: Annotated[
        str,
        _option(
            "--token-limit",
            metavar="CALLS/SECONDS",
            text="Calls to the token endpoint; above it: 429.",
            panel=_LIMITS,
        ),
    ] = "/".join(map(str, _DEFAULT.token_limit)),
    retry_after: Annotated[
        RetryAfter,
        _option("--retry-after", metavar="FORM", text="seconds or date: the form of Retry-After.", panel=_LIMITS),
    ] = _DEFAULT.retry_after,
    max_body_bytes: Annotated[
        int,
        _option("--max-body-bytes", metavar="N", text="Size limit of a body; above it: 413.", panel=_LIMITS, min=1),
    ] = _DEFAULT.max_body_bytes,
    accept_gzip: Annotated[
        bool,
        typer.Option("--accept-gzip", help="Accept gzip bodies instead of answering 415.", rich_help_panel=_LIMITS),
    ] = False,
    latency_seconds: Annotated[
        float,
        _option("--latency-seconds", metavar="S", text="Wait before each answer.", panel=_LIMITS, min=0, max=3600),
    ] = 0.0,
    jitter_seconds: Annotated[
        float,
        _option("--jitter-seconds", metavar="S", text="Random addition to the wait.", panel=_LIMITS, min=0, max=3600),
    ] = 0.0,
    subscription_key: Annotated[
        str, _option("--subscription-key", metavar="KEY", text="The primary key.", panel=_ACCESS)
    ] = _DEFAULT.subscription_key,
    secondary_key: Annotated[
        str, _option("--secondary-key", metavar="KEY", text="The secondary key.", panel=_ACCESS)
    ] = _DEFAULT.secondary_key,
    token_lifetime_seconds: Annotated[
        int,
        _option(
            "--token-lifetime-seconds",
            metavar="S",
            text="Lifetime of the tokens of the token endpoint.",
            panel=_ACCESS,
            min=1,
            max=10**9,
        ),
    ] = _DEFAULT.token_lifetime_seconds,
    token_skew_seconds: Annotated[
        float,
        _option(
            "--token-skew-seconds",
            metavar="S",
            text="How far the token endpoint's clock is ahead.",
            panel=_ACCESS,
            min=-(10**9),
            max=10**9,
        ),
    ] = 0.0,
    clock_offset_seconds: Annotated[
        float,
        _option(
            "--clock-offset-seconds",
            metavar="S",
            text="How far the service's clock is ahead of this machine's.",
            panel=_ACCESS,
            min=-(10**9),
            max=10**9,
        ),
    ] = 0.0,
    faults: Annotated[
        Path | None, _option("--faults", metavar="FILE", text="A fault script, TOML or (*.json) JSON.", panel=_FAULTS)
    ] = None,
    fault: Annotated[
        list[str] | None,
        _option("--fault", metavar="RULE", text="One rule, such as 'reset every=7 when=after'.", panel=_FAULTS),
    ] = None,
    chaos: Annotated[
        float,
        _option(
            "--chaos", metavar="SHARE", text="Share of requests that fail in some way.", panel=_FAULTS, min=0, max=1
        ),
    ] = 0.0,
) -> None:
    """
    Run the service on this machine: no account is needed, and no data leaves the machine.

    It checks keys and tokens, accepts batches of events, makes the daily report from them, and fails on demand. It
    prints its address and a configuration that points at it. Ctrl-C ends it.

    Example: a rehearsal, each line but the first in a second terminal:

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

    options = SandboxOptions(
        host=host,
        port=port,
        account_id=account_id,
        subscription_key=subscription_key,
        secondary_key=secondary_key,
        store_path=str(store) if store else IN_MEMORY,
        blackhole=blackhole,
        profile=profile,
        rejection=rejection,
        answer=answer,
        repeats=repeats,
        figures=figures,
        rate_limit=CallLimit.parse(rate_limit, key="--rate-limit") if rate_limit is not None else None,
        quota=CallLimit.parse(quota, key="--quota") if quota is not None else None,
        retry_after=retry_after,
        max_body_bytes=max_body_bytes,
        accept_gzip=accept_gzip,
        latency_seconds=latency_seconds,
        jitter_seconds=jitter_seconds,
        token_lifetime_seconds=token_lifetime_seconds,
        token_skew_seconds=token_skew_seconds,
        token_limit=CallLimit.parse(token_limit, key="--token-limit"),
        clock_offset_seconds=clock_offset_seconds,
        seed=seed,
    )
    script = _script(faults, fault or [], chaos, seed=seed)

    def announce(access: Access) -> None:
        where = "Configuration" if output is None else _write_configuration(output, access)
        print(_welcome(access, where, now_seconds=time.time() + clock_offset_seconds), flush=True)

    async def run() -> None:
        await serve(options, script, clock=time.time, announce=announce, observe=_logging() if verbose else None)

    run_async(run)


def _logging() -> Callable[[RequestEntry], None]:
    """Return what logs a request: no header, no body, and of the address only the path."""
    import structlog

    from shipper.status.logs import configure_logs

    configure_logs("debug", "auto", now=time.monotonic)  # above debug, lines of one kind are left out
    log = structlog.get_logger("sandbox")

    def observe(entry: RequestEntry) -> None:
        counts = {"events": entry.events, "duplicates": entry.duplicates, "rejected": entry.rejected}
        log.debug(
            "request",
            method=entry.method,
            path=entry.path,
            status=entry.status,
            **{name: value for name, value in counts.items() if value},
            **({"fault": entry.fault} if entry.fault else {}),
            seconds=entry.seconds,
        )

    return observe


def _script(file: Path | None, rules: list[str], chaos: float, *, seed: int) -> FaultScript:
    """Combine the rules of the file, those of the command line, and --chaos."""
    from shipper.sandbox.faults import Chance, FaultScript, load_script, read_rule

    script = load_script(file) if file else FaultScript(seed=seed)
    if not 0 <= chaos <= 1:
        raise ConfigError(f"{chaos} is not a share from 0 to 1", key="--chaos", source="sandbox")
    more = [read_rule(rule, source="--fault") for rule in rules]
    if chaos:
        more.append(Chance(operation="any", probability=chaos))
    return FaultScript(seed=script.seed, fault=[*script.fault, *more])


def _welcome(access: Access, where: str, *, now_seconds: float) -> str:
    from shipper.sandbox.server import configuration_snippet

    return (
        f"# The sandbox listens at {access.base_url} (Ctrl-C ends it). {plain(where)}:\n\n"
        f"{configuration_snippet(access)}\n"
        f"# One event by hand, a fresh token, what has arrived, and everything else that can be asked and set:\n\n"
        f"{_curl_line(access, now_seconds=now_seconds)}\n"
        f"{_token_line(access)}\n"
        f"curl -sS {access.base_url}/_sandbox/counts\n"
        f"curl -sS {access.base_url}/_sandbox/\n"
    )


def _curl_line(access: Access, *, now_seconds: float) -> str:
    """Write a request that works when it is pasted into a shell."""
    from datetime import UTC, datetime

    from shipper.model import wire
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


def _token_line(access: Access) -> str:
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
    Put the configuration into a file of mode 0600; whoever waits for it reads all of it.

    Returns:
        The words above it where it is shown. A file that was changed since a sandbox wrote it is left as it is.
    Raises:
        ConfigError: The file is there and was written by someone else, or it cannot be written.
    """
    from shipper.sandbox.server import configuration_snippet

    try:
        before = path.read_bytes() if path.exists() else None
        if before is not None and not before.startswith(_OWN):
            raise ConfigError(
                "is there already and is not the sandbox's own; move it or name another file",
                key="--output",
                source=str(path),
            )
        first_line, _, rest = (before or b"").partition(b"\n")
        if before is not None and first_line != _first_line(rest):
            return (
                f"{path.absolute()}\n# was changed since a sandbox wrote it, and is left as it is. To go on with it, "
                "see\n# that its sections are these; for a new one, delete it and start the sandbox again"
            )
        # Not where the state of a shipper in earnest may be.
        state = toml_value(path.with_name("shipper-state").absolute())
        text = f"{configuration_snippet(access)}\n[state]\ndirectory = {state}\n".encode()
        replace_file(path, _first_line(text) + b"\n" + text)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", key="--output", source=str(path)) from error
    return f"Configuration, written to {path.absolute()}"


def _first_line(rest: bytes) -> bytes:
    """Return the line above a configuration, which shows whether it is as the sandbox wrote it."""
    return b"%b; written anew at every start, unless it was changed (%08x)." % (_OWN, crc32(rest))
