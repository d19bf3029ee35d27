"""`shipper check`: checks the configuration and the connection to the service."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import msgspec
import typer

from shipper.check import Item, Result
from shipper.cli.commands import flag, option
from shipper.cli.common import (
    SettingsOptions,
    format_option,
    plain,
    print_json,
    run_async,
    several,
    tolerate_closed_stdout,
)
from shipper.config.load import Entry, misspelt_variables
from shipper.config.secrets import LiteralSecret, fetch_secret, resolve_secret
from shipper.config.settings import (
    EndpointSettings,
    KafkaSettings,
    Settings,
    build_settings,
    require_endpoint,
    secrets_in,
)
from shipper.model.errors import ConfigError, StateError
from shipper.model.version import __version__
from shipper.system.native import ENGINE
from shipper.system.permissions import access_problem, describe_ownership, link_problem

if TYPE_CHECKING:
    from shipper.check.service import Probe

Section = Literal["intake", "report"]
_SECTIONS: Final[tuple[Section, ...]] = ("intake", "report")
_WIDTH: Final = len("intake.client_certificate")
_COLOURS: Final = {"ok": "green", "note": "yellow", "fail": "bold red"}


class CheckSelection(NamedTuple):
    online: Annotated[bool, flag("Also test the connection to the service; sends no records.", "--online")] = False
    only: Annotated[
        Section | None, option("ENDPOINT", "Check only intake or only report; default: both, if configured.")
    ] = None
    account: Annotated[int | None, option("N", "The account whose report for yesterday is requested.", min=1)] = None
    create_topics: Annotated[
        bool, flag("With input.kafka: create the topics that it writes to, if they are missing.", "--create-topics")
    ] = False


def check(
    checks: CheckSelection,
    form: Annotated[Literal["text", "json"], format_option("text, or json: one document.", "--json")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Check configuration, secrets and state directory and, with --online, each step of the connection to the service.

    The steps are dns, connect, tls, credentials; route, key and token with one request that sends no records; and
    clock. Exits with 2 if the configuration is wrong, or with 4 if a step failed.

    Example: shipper check --online
    """
    if checks.create_topics and not checks.online:
        raise typer.BadParameter("--create-topics needs --online")
    findings = _Findings(is_json=form == "json")
    with tolerate_closed_stdout():
        try:
            entries = options.entries()
            settings = build_settings(entries, environ=os.environ)
        except ConfigError as error:
            findings.report(Item("fail", "configuration", str(error)))
        else:
            from shipper.status.logs import configure_logs

            # Logs would repeat the reported items.
            level = settings.log.level if options.log_level else "error"
            configure_logs(level, settings.log.format, now=time.monotonic)
            secrets = [key for key, _ in secrets_in(settings) if key.partition(".")[0] in _SECTIONS]
            findings.width = max([_WIDTH, *map(len, secrets)])
            if settings.input.kafka is not None:
                inputs = _check_group(settings, settings.input.kafka, checks)
            else:
                inputs = chain(_check_state(settings), _check_files(settings))
            for item in chain(_check_configuration(entries), inputs):
                findings.report(item)
            run_async(lambda: _check_endpoints(settings, checks, findings.report))
            if not checks.online:
                findings.report(Item("note", "service", "was not contacted; to test the connection, add --online"))
        findings.finish()
    raise typer.Exit(findings.exit_code)


class _Findings:
    """Prints items immediately, or all of them as one document at the end."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._items: list[Item] = []
        self.width = _WIDTH

    @property
    def exit_code(self) -> int:
        """2 = a setting is wrong, 4 = a connection step failed."""
        failed = [item.name for item in self._items if item.result == "fail"]
        return 0 if not failed else 4 if all(":" in name for name in failed) else 2

    def report(self, item: Item) -> None:
        item = Item(item.result, item.name, plain(item.what))
        self._items.append(item)
        if self._is_json:
            return
        rest = f"  {item.name:<{self.width}}  {' '.join(item.what.split())}"
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.text import Text

            line = Text.assemble((f"{item.result:<4}", _COLOURS[item.result]), rest)
            Console(highlight=False).print(line, soft_wrap=True)
        else:
            print(f"{item.result:<4}{rest}", flush=True)

    def finish(self) -> None:
        if self._is_json:
            print_json(msgspec.json.encode({"exit_code": self.exit_code, "items": self._items}))


# Configuration -------------------------------------------------------------------------------------------------------


def _check_configuration(entries: Mapping[str, Entry]) -> Iterator[Item]:
    """Report program and user, as a service may run another program or as another user than a shell does."""
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container
        user = str(os.geteuid())
    program = f"shipper {__version__} ({ENGINE}), Python {platform.python_version()}, user {user}"
    yield Item("ok", "program", program)
    sources = {entry.source for entry in entries.values()}
    variables = {source for source in sources if source.startswith("environment ")}
    flags = {source for source in sources if source.startswith("--set ") or source == "command line"}
    parts = sorted(sources - variables - flags) or ["no settings file"]
    parts += [f"{len(variables)} from the environment"] if variables else []
    parts += [f"{len(flags)} from flags"] if flags else []
    yield Item("ok", "configuration", ", ".join(parts))
    for name, similar in misspelt_variables(Settings, os.environ).items():
        yield Item("note", "configuration", f"{name} is set, but not used; did you mean {similar}?")


# Inputs and state ----------------------------------------------------------------------------------------------------


def _check_state(settings: Settings) -> Iterator[Item]:
    from shipper.pipeline.opening import service_change
    from shipper.state.directory import lock_holder, lock_problem

    directory = settings.state.directory
    result, message = _check_directory(directory)
    if result != "fail" and (problem := _store_problem(directory) or lock_problem(directory)):
        result, message = "fail", problem
    yield Item(result, "state.directory", message)
    holder = lock_holder(directory)
    if holder is not None:
        process = f"process {holder}" if holder else "another process"
        yield Item("note", "state.directory", f"{process} uses it; a second shipper would exit with code 5")
    if message := service_change(settings):
        yield Item("note", "state.directory", message)
    parent = next(folder for folder in (directory, *directory.parents) if os.path.isdir(folder))
    status = os.statvfs(parent)
    free, needed = status.f_bavail * status.f_frsize, settings.spool.max_bytes + settings.state.dead_letter_max_bytes
    message = f"{free / 1e9:,.1f} GB free"
    if free < needed:
        message += f"; spool.max_bytes and state.dead_letter_max_bytes allow up to {needed / 1e9:,.1f} GB"
    yield Item("note" if free < needed else "ok", "state.disk", message)


def _check_directory(directory: Path) -> tuple[Result, str]:
    """Check whether a state directory can be used, without creating or changing anything."""
    if problem := link_problem(directory):
        return "fail", f"{problem}; create its target, or choose another directory"
    if not os.path.lexists(directory):
        parent = next(folder for folder in directory.parents if os.path.lexists(folder))
        if os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK):
            return "ok", f"{directory} does not exist yet and can be created"
        return "fail", f"{directory} cannot be created in {parent}; choose another directory"
    if not os.path.isdir(directory):
        return "fail", f"{directory} is not a directory; choose another one"
    status = directory.stat()
    mode, is_ours = status.st_mode & 0o777, status.st_uid == os.geteuid()
    files = [path for path in (directory, directory / "lock", directory / "state.db") if os.path.lexists(path)]
    if problem := next(filter(None, map(access_problem, files)), ""):
        return "fail", problem
    if mode & 0o077 and not is_ours and os.geteuid():
        return (
            "fail",
            f"{directory} is accessible to other users, and its mode cannot be changed: {describe_ownership(status)}",
        )
    if not is_ours:
        return ("note", f"{directory}: {describe_ownership(status)}; one may be unable to read what the other creates")
    if mode & 0o077:
        return "note", f"{directory} is accessible to other users (mode {mode:04o}); the next start restricts it"
    return "ok", f"{directory} (mode {mode:04o})"


def _store_problem(directory: Path) -> str:
    """Return why the next start would refuse the saved state; empty if it would not."""
    from shipper.state.schema import check_pages, check_wal, reading
    from shipper.status.overview import read_overview

    try:
        read_overview(directory)
        check_wal(directory / "state.db")
        with reading(directory) as db:
            check_pages(db)
    except StateError as error:
        return str(error)
    return ""


def _check_files(settings: Settings) -> Iterator[Item]:
    from shipper.sources.discovery import Patterns

    include = settings.input.include
    patterns = Patterns(include, exclude=settings.input.exclude, state_directory=settings.state.directory)
    files = sorted({match.path for match in patterns.find()})
    for message in patterns.unmatched().values():
        yield Item("note", "input.include", message)
    problems = [problem for path in files if (problem := access_problem(path, os.R_OK))]
    if problems:
        more = f"; and {len(problems) - 1:,} more" if len(problems) > 1 else ""
        yield Item("fail", "input.include", f"{problems[0]}{more}")
    if not include:
        yield Item("note", "input.include", "is empty; only `shipper run` needs it")
    elif files:
        yield Item("ok", "input.include", several(len(files), "file matches", "files match"))


def _check_group(settings: Settings, kafka: KafkaSettings, checks: CheckSelection) -> Iterator[Item]:
    """Check the Kafka client and secrets and, with --online, topics and permissions."""
    try:
        from shipper.kafka.topics import Topics

        topics = Topics(kafka, max_record_bytes=settings.input.max_record_bytes)
    except ConfigError as error:
        yield Item("fail", error.key, error.message)
        return
    yield Item("ok", "input.kafka", f"member of group {kafka.group_id}; no state directory is used")
    if not checks.online:
        return
    created = topics.create() if checks.create_topics else iter(())
    for topic in chain(created, topics.findings(), topics.rights()):
        yield Item("fail" if topic.problem else "ok", f"kafka:{topic.name}", topic.problem or topic.detail)
        if topic.is_unreachable or topics.is_refused:
            return


# Endpoints -----------------------------------------------------------------------------------------------------------


async def _check_endpoints(settings: Settings, checks: CheckSelection, report: Callable[[Item], None]) -> None:
    from shipper.check.service import Checkup

    only = checks.only
    if settings.intake is None and settings.report is not None and only is None:
        report(Item("note", "intake", "is not configured; without it, nothing can be shipped"))
        only = "report"
    for section in _SECTIONS:
        endpoint: EndpointSettings | None = getattr(settings, section)
        if only not in {None, section} or (section == "report" and endpoint is None and only is None):
            continue
        has_secrets = True
        try:
            require_endpoint(settings, section)
        except ConfigError as error:
            report(Item("fail", error.key, error.message))
            has_secrets = False
        if endpoint is None:
            continue
        await _check_secrets(endpoint, section, report)
        for item in _check_certificates(endpoint, section):
            report(item)
        if checks.online:
            checkup = Checkup(
                endpoint, settings.delivery, section=section, report=report, wall_time=time.time, rng=Random()
            )
            is_connected = await checkup.connect()
            if has_secrets:
                probe = _probe(section, checks.account) if is_connected else None
                await checkup.request(probe)
                if is_connected and probe is None:
                    report(Item("note", f"{section}:route", "not tested; it needs --account N"))


async def _check_secrets(endpoint: EndpointSettings, section: Section, report: Callable[[Item], None]) -> None:
    from shipper.check.service import describe_expiry, describe_origin
    from shipper.delivery.tokens import expiry_claim

    secrets = sorted(secrets_in(endpoint, f"{section}."), key=lambda item: ".oauth2." in item[0])  # own ones first
    for key, secret in secrets:
        try:
            if key.endswith("proxy_password"):
                value = resolve_secret(secret, key=key)  # it cannot come from a command
            else:
                value = await fetch_secret(secret, key=key, is_for_header=".oauth2." not in key)
        except ConfigError as error:
            report(Item("fail", key, error.message))
            continue
        result, expiry = describe_expiry(expiry_claim(value) if key.endswith(".token") else None, time.time())
        origin = describe_origin(secret)
        message = f"is available from {origin}{expiry}"
        if isinstance(secret, LiteralSecret):
            result, message = "note", f'is a literal in {origin}; better: {{ env = "NAME" }} or a file{expiry}'
        report(Item(result, key, message))


def _check_certificates(endpoint: EndpointSettings, section: Section) -> Iterator[Item]:
    from shipper.delivery.tls import is_https, tls_context

    token_url = None if endpoint.oauth2 is None else endpoint.oauth2.token_url
    if not any(map(is_https, (endpoint.base_url, endpoint.proxy, token_url))):
        return
    try:
        tls_context(endpoint, section)
    except ConfigError as error:
        yield Item("fail", error.key, error.message)
        return
    yield Item("ok", f"{section}.ca_bundle", str(endpoint.ca_bundle or "this system's certificate authorities"))
    if endpoint.client_certificate is not None:
        yield Item("ok", f"{section}.client_certificate", f"{endpoint.client_certificate}, with its key")


def _probe(section: Section, account: int | None) -> Probe | None:
    """Return the request to send; None for a report without an account."""
    from shipper.check.service import EMPTY_BATCH, Probe
    from shipper.report.client import report_path

    if section == "intake":
        return EMPTY_BATCH
    if account is None:
        return None
    yesterday = datetime.fromtimestamp(time.time(), UTC).date() - timedelta(days=1)
    return Probe(
        "GET",
        report_path(account, yesterday, yesterday),
        remark="a report was read; nothing was written",
        hint=f"; or there is no account {account}",
    )
