"""The command `sandbox`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

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

_DEFAULT: Final = SandboxOptions()
_FIRST_LINE: Final = "# Written by `shipper sandbox`; it is written anew at every start."


def sandbox(
    host: Annotated[str, typer.Option(help="Loopback address to listen on.")] = _DEFAULT.host,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 = any free one.")] = _DEFAULT.port,
    write_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a configuration for this sandbox (mode 0600).")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the events in this file, not in memory.")
    ] = None,
    blackhole: Annotated[
        bool, typer.Option("--blackhole", help="Count events; neither validate nor keep them.")
    ] = False,
    profile: Annotated[
        Profile, typer.Option(help="document: the documented rules; strict: also what is publicly known.")
    ] = _DEFAULT.profile,
    rejection: Annotated[
        Rejection, typer.Option(help="Effect of a bad event: partial: the others are accepted; whole: none is.")
    ] = _DEFAULT.rejection,
    answer: Annotated[
        AnswerShape,
        typer.Option(help="counts: 202; created: 201; empty: 200; no-content: 204; per-event: 207."),
    ] = _DEFAULT.answer,
    repeats: Annotated[Repeats, typer.Option(help="Effect of a repeated EventId.")] = _DEFAULT.repeats,
    account_id: Annotated[
        int, typer.Option(min=1, max=2**63 - 1, help="The affiliate account that has a report.")
    ] = _DEFAULT.account_id,
    figures: Annotated[
        Figures, typer.Option(help="Figures of the report besides registrations: received: zero; seeded: invented.")
    ] = _DEFAULT.figures,
    seed: Annotated[int, typer.Option(help="For invented figures, jitter, and faults by chance.")] = _DEFAULT.seed,
    subscription_key: Annotated[str, typer.Option(help="The primary key.")] = _DEFAULT.subscription_key,
    secondary_key: Annotated[str, typer.Option(help="The secondary key.")] = _DEFAULT.secondary_key,
    rate_limit: Annotated[
        str | None, typer.Option(metavar="CALLS/SECONDS", help="Above it: 429 with Retry-After.")
    ] = None,
    quota: Annotated[str | None, typer.Option(metavar="CALLS/SECONDS", help="Above it: 403 with Retry-After.")] = None,
    retry_after: Annotated[RetryAfter, typer.Option(help="The form of Retry-After.")] = _DEFAULT.retry_after,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Size limit of a body; above it: 413.")
    ] = _DEFAULT.max_body_bytes,
    accept_gzip: Annotated[
        bool, typer.Option("--accept-gzip", help="Accept gzip bodies instead of answering 415.")
    ] = False,
    latency_seconds: Annotated[float, typer.Option(min=0, max=3600, help="Wait before each answer.")] = 0.0,
    jitter_seconds: Annotated[float, typer.Option(min=0, max=3600, help="Random addition to the wait.")] = 0.0,
    token_lifetime_seconds: Annotated[
        int, typer.Option(min=1, max=10**9, help="Lifetime of the tokens of the token endpoint.")
    ] = _DEFAULT.token_lifetime_seconds,
    token_skew_seconds: Annotated[
        float, typer.Option(min=-(10**9), max=10**9, help="How far the token endpoint's clock is ahead.")
    ] = 0.0,
    token_limit: Annotated[
        str, typer.Option(metavar="CALLS/SECONDS", help="Calls to the token endpoint; above it: 429.")
    ] = "/".join(map(str, _DEFAULT.token_limit)),
    clock_offset_seconds: Annotated[
        float, typer.Option(min=-(10**9), max=10**9, help="How far the service's clock is ahead of this machine's.")
    ] = 0.0,
    faults: Annotated[Path | None, typer.Option(metavar="FILE", help="A fault script, TOML or (*.json) JSON.")] = None,
    fault: Annotated[
        list[str] | None, typer.Option(metavar="RULE", help="One rule, such as 'reset every=7 when=after'.")
    ] = None,
    chaos: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that fail in some way.")] = 0.0,
) -> None:
    """
    Run the service on this machine: no account is needed, and no data leaves the machine.

    It checks keys and tokens, accepts batches of events, makes the daily report from them, and fails on demand. It
    prints its address and a configuration that points at it. Ctrl-C ends it.

    Example: a rehearsal, each line but the first in a second terminal:

    \b
      shipper sandbox --write-config shipper.toml --figures seeded
      shipper sample --count 100000 > events.ndjson
      shipper backfill events.ndjson
      shipper report 1001 $(date +%Y-%m-01) $(date +%F)
      curl -sS http://127.0.0.1:8080/_sandbox/counts

    Faults: slow, limited, every 7th connection reset after its batch was stored, requests 5 to 9 unavailable:

    \b
      shipper sandbox --write-config shipper.toml --latency-seconds 0.1 --jitter-seconds 0.2 \\
        --rate-limit 100/10 --fault 'reset every=7 when=after' --fault 'status status=503 requests=5-9'

    Effects of --fault: status, html, delay, hang, reset, truncate, drip, rotate_key, chance. When: requests, every,
    probability, times, operation (intake, report, token, any). At run time: PUT /_sandbox/faults.

    GET /_sandbox/ lists all controls.
    """
    import time

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
        if write_config is not None:
            _write_configuration(write_config, access)
        print(_welcome(access, write_config, now_seconds=time.time() + clock_offset_seconds), flush=True)

    async def run() -> None:
        await serve(options, script, clock=time.time, announce=announce)

    run_async(run)


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


def _welcome(access: Access, written_to: Path | None, *, now_seconds: float) -> str:
    from shipper.sandbox.server import configuration_snippet

    where = f", written to {plain(str(written_to.absolute()))}" if written_to else ""
    return (
        f"# The sandbox listens at {access.base_url} (Ctrl-C ends it). Configuration{where}:\n\n"
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


def _write_configuration(path: Path, access: Access) -> None:
    """
    Put the configuration into a file of mode 0600; whoever waits for it reads all of it.

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
        # Not where the state of a shipper in earnest may be.
        state = toml_value(path.with_name("shipper-state").absolute())
        text = f"{_FIRST_LINE}\n{configuration_snippet(access)}\n[state]\ndirectory = {state}\n"
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", key="--write-config", source=str(path)) from error
