"""`shipper check`: whether the configuration is right, and whether each step to the service works."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from shipper.cli.common import (
    SettingsOptions,
    format_option,
    plain,
    print_json,
    reader_may_leave,
    run_async,
    several,
    with_settings_options,
)
from shipper.config.load import Written, misspelt_variables
from shipper.config.secrets import LiteralSecret, Secret, fetch_secret, resolve_secret
from shipper.config.settings import EndpointSettings, KafkaSettings, Settings, require_endpoint, settings_from
from shipper.model.errors import ConfigError
from shipper.model.version import __version__
from shipper.system.native import ENGINE
from shipper.system.permissions import obstacle, whose

if TYPE_CHECKING:
    from shipper.check.service import Checkup, Item, Probe, Result

_SECTIONS: Final[tuple[Literal["intake", "report"], ...]] = ("intake", "report")
_WIDTH: Final = len("intake.client_certificate")
_COLOURS: Final = {"ok": "green", "note": "yellow", "fail": "bold red"}


@with_settings_options
def check(
    online: Annotated[
        bool, typer.Option("--online", help="Also test the connection to the service; writes nothing.")
    ] = False,
    only: Annotated[
        Literal["intake", "report"] | None,
        typer.Option("--only", metavar="ENDPOINT", help="intake or report; else both, if configured."),
    ] = None,
    account: Annotated[
        int | None,
        typer.Option("--account", min=1, metavar="N", help="The account whose report of yesterday is requested."),
    ] = None,
    create_topics: Annotated[
        bool,
        typer.Option("--create-topics", help="With input.kafka: make the topics that it writes, if they are missing."),
    ] = False,
    form: Annotated[Literal["text", "json"], format_option("text, or json: one document.", "--json")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Check configuration, secrets and state directory and, with --online, each step to the service by itself.

    The steps are dns, connect, tls, credentials, then route, key and token by one request that writes nothing, and the
    clock. Exits with 2 if the configuration is wrong, else with 4 if a step failed.

    Example: shipper check --online
    """
    if create_topics and not online:
        raise typer.BadParameter("--create-topics needs --online")
    findings = _Findings(is_json=form == "json")
    with reader_may_leave():
        settings = _settings(findings, options)
        if settings is not None:
            if settings.input.kafka is None:
                _check_state(settings, findings)
                _check_input(settings, findings)
            else:
                _check_group(settings, settings.input.kafka, findings, is_online=online, creates=create_topics)
            run_async(lambda: _check_endpoints(settings, findings, only=only, is_online=online, account=account))
            if not online:
                findings.add("note", "service", "was not contacted; to test the way to it, add --online")
        findings.finish()
    raise typer.Exit(findings.exit_code)


class _Findings:
    """Prints items as they are found, or all of them as one document at the end."""

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        self._items: list[Item] = []
        self.width = _WIDTH

    @property
    def exit_code(self) -> int:
        """2 = a setting is wrong, 4 = a step to the service failed."""
        failed = [item.name for item in self._items if item.result == "fail"]
        return 0 if not failed else 4 if all(":" in name for name in failed) else 2

    def add(self, result: Result, name: str, what: str) -> None:
        from shipper.check.service import Item

        self.take(Item(result, name, what))

    def take(self, item: Item) -> None:
        self._items.append(item)
        if self._is_json:
            return
        rest = f"  {item.name:<{self.width}}  {plain(' '.join(item.what.split()))}"
        if sys.stdout.isatty():
            from rich.console import Console
            from rich.text import Text

            line = Text.assemble((f"{item.result:<4}", _COLOURS[item.result]), rest)
            Console(highlight=False).print(line, soft_wrap=True)
        else:
            print(f"{item.result:<4}{rest}", flush=True)

    def finish(self) -> None:
        if self._is_json:
            document = {"exit_code": self.exit_code, "items": self._items}
            print_json(msgspec.json.encode(document))


# The configuration ---------------------------------------------------------------------------------------------------


def _settings(findings: _Findings, options: SettingsOptions) -> Settings | None:
    from shipper.status.logs import configure_logs

    try:
        written = options.load()
        settings = settings_from(written, environ=os.environ)
    except ConfigError as error:
        findings.add("fail", "configuration", str(error))
        return None
    # What is found out is told as items; as logs, it would be told twice.
    configure_logs(settings.log.level if options.log_level else "error", settings.log.format, now=time.monotonic)
    secrets = [key for section in _SECTIONS for key, *_ in _secrets(getattr(settings, section), section)]
    findings.width = max([_WIDTH, *map(len, secrets)])
    findings.add("ok", "program", _program())
    findings.add("ok", "configuration", _sources(written))
    for name, meant in misspelt_variables(Settings, os.environ).items():
        findings.add("note", "configuration", f"{name} is set, and not read; did you mean {meant}?")
    return settings


def _program() -> str:
    """Show what runs, and as whom: a service may run another one, or as another user, than a shell does."""
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # as in a container
        user = str(os.geteuid())
    return f"shipper {__version__} ({ENGINE}), Python {platform.python_version()}, user {user}"


def _sources(written: Mapping[str, Written]) -> str:
    sources = {entry.source for entry in written.values()}
    variables = {source for source in sources if source.startswith("environment ")}
    flags = {source for source in sources if source.startswith("--set ") or source == "command line"}
    files = sorted(sources - variables - flags) or ["no settings file"]
    counts = {"the environment": len(variables), "flags": len(flags)}
    return ", ".join([*files, *(f"{count} from {where}" for where, count in counts.items() if count)])


def _secrets(endpoint: EndpointSettings | None, section: str) -> Iterator[tuple[str, Secret, bool]]:
    """Yield the key of each secret, the secret, and whether it goes into a header."""
    if endpoint is None:
        return
    for name in endpoint.__struct_fields__:
        value = getattr(endpoint, name)
        if isinstance(value, Secret):
            yield f"{section}.{name}", value, True
    if endpoint.oauth2 is not None:
        for name in ("client_secret", "password"):
            value = getattr(endpoint.oauth2, name)
            if value is not None:
                yield f"{section}.oauth2.{name}", value, False


# This machine --------------------------------------------------------------------------------------------------------


def _check_state(settings: Settings, findings: _Findings) -> None:
    from shipper.state.directory import holder_of

    directory = settings.state.directory
    findings.add(*_directory(directory))
    holder = holder_of(directory)
    if holder is not None:
        who = f"process {holder}" if holder else "another process"
        findings.add("note", "state.directory", f"{who} holds it; a second shipper that uses it ends with exit code 5")
    place = next(each for each in (directory, *directory.parents) if os.path.isdir(each))
    status = os.statvfs(place)
    free, wanted = status.f_bavail * status.f_frsize, settings.spool.max_bytes + settings.state.dead_letter_max_bytes
    what = f"{free / 1e9:,.1f} GB free"
    if free < wanted:
        what += f"; spool.max_bytes and state.dead_letter_max_bytes allow for {wanted / 1e9:,.1f} GB"
    findings.add("note" if free < wanted else "ok", "state.disk", what)


def _directory(directory: Path) -> tuple[Result, str, str]:
    """Check whether a state directory can be used; nothing is made or changed."""
    name = "state.directory"
    if not os.path.lexists(directory):
        above = next(each for each in directory.parents if os.path.lexists(each))
        if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):
            return "ok", name, f"{directory} does not exist yet and can be created"
        return "fail", name, f"{directory} cannot be created in {above}; name another directory"
    if not os.path.isdir(directory):
        return "fail", name, f"{directory} is not a directory; name another one"
    status = directory.stat()
    mode, is_ours = status.st_mode & 0o777, status.st_uid == os.geteuid()
    owner = whose(status)
    files = [path for path in (directory, directory / "lock", directory / "state.db") if os.path.lexists(path)]
    if why := next(filter(None, map(obstacle, files)), ""):
        return "fail", name, why
    if mode & 0o077 and not is_ours and os.geteuid():
        return "fail", name, f"{directory} is open to others and cannot be closed: {owner}"
    if not is_ours:
        return "note", name, f"{directory}: {owner}; what one of them makes there, the other may not read"
    if mode & 0o077:
        return "note", name, f"{directory} is open to others (mode {mode:04o}); the next start closes it"
    return "ok", name, f"{directory} (mode {mode:04o})"


def _check_input(settings: Settings, findings: _Findings) -> None:
    from shipper.sources.discovery import Patterns

    name, include = "input.include", settings.input.include
    patterns = Patterns(include, exclude=settings.input.exclude, own_directory=settings.state.directory)
    found = {each.path for each in patterns.find()}
    for words in patterns.unmatched().values():
        findings.add("note", name, words)
    closed = [why for path in sorted(found) if (why := obstacle(path, os.R_OK))]
    if closed:
        more = f"; and {len(closed) - 1:,} more" if len(closed) > 1 else ""
        findings.add("fail", name, f"{closed[0]}{more}")
    if not include:
        findings.add("note", name, "is empty; `shipper run` needs it, `pipe` and `backfill` do not")
    elif found:
        findings.add("ok", name, several(len(found), "file matches", "files match"))


# Brokers -------------------------------------------------------------------------------------------------------------


def _check_group(
    settings: Settings, kafka: KafkaSettings, findings: _Findings, *, is_online: bool, creates: bool
) -> None:
    """Check what a member needs: the client, secrets, and with the brokers the topics and the rights."""
    try:
        from shipper.kafka.topics import Topics

        topics = Topics(kafka, max_record_bytes=settings.input.max_record_bytes)
    except ConfigError as error:
        findings.add("fail", error.key, error.message)
        return
    findings.add("ok", "input.kafka", f"member of group {kafka.group_id}; no state directory is used")
    if not is_online:
        return
    found = topics.create() if creates else iter(())
    for each in chain(found, topics.findings(), topics.rights()):
        findings.add("fail" if each.problem else "ok", f"kafka:{each.name}", each.problem or each.what)
        if each.is_away:
            return


# Endpoints -----------------------------------------------------------------------------------------------------------


async def _check_endpoints(
    settings: Settings, findings: _Findings, *, only: str | None, is_online: bool, account: int | None
) -> None:
    from shipper.check.service import Checkup

    if settings.intake is None and settings.report is not None and only is None:
        findings.add("note", "intake", "is not configured; without it nothing can be shipped")
        only = "report"
    for section in _SECTIONS:
        endpoint: EndpointSettings | None = getattr(settings, section)
        if only not in {None, section} or (section == "report" and endpoint is None and only is None):
            continue
        is_whole = True
        try:
            require_endpoint(settings, section)
        except ConfigError as error:
            findings.add("fail", error.key, error.message)
            is_whole = False
        if endpoint is not None:
            await _check_secrets(endpoint, section, findings)
            _check_certificates(endpoint, section, findings)
            if is_online:
                checkup = Checkup(
                    endpoint,
                    settings.delivery,
                    section=section,
                    tell=findings.take,
                    wall_time=time.time,
                    rng=Random(),
                )
                await _go_online(checkup, section, findings, account=account, is_whole=is_whole)


async def _go_online(
    checkup: Checkup, section: str, findings: _Findings, *, account: int | None, is_whole: bool
) -> None:
    """Test each step to the service; `is_whole`: there are a key and a token to send."""
    can_ask = await checkup.reach()
    if not is_whole:
        return
    probe = _probe(section, account) if can_ask else None
    await checkup.ask(probe)
    if can_ask and probe is None:
        findings.add("note", f"{section}:route", "not requested: that needs --account N")


async def _check_secrets(endpoint: EndpointSettings, section: str, findings: _Findings) -> None:
    from shipper.check.service import life_words, origin_of
    from shipper.delivery.token_sources import expiry_claim

    for key, secret, is_for_header in _secrets(endpoint, section):
        try:
            if key.endswith("proxy_password"):
                value = resolve_secret(secret, key=key)  # where it is used, no program can be run
            else:
                value = await fetch_secret(secret, key=key, is_for_header=is_for_header)
        except ConfigError as error:
            findings.add("fail", key, error.message)
            continue
        result, life = life_words(expiry_claim(value) if key.endswith(".token") else None, time.time())
        what = f"can be had from {origin_of(secret)}{life}"
        if isinstance(secret, LiteralSecret):
            result, what = "note", f'stands in {origin_of(secret)}; better: {{ env = "NAME" }} or a file{life}'
        findings.add(result, key, what)


def _check_certificates(endpoint: EndpointSettings, section: str, findings: _Findings) -> None:
    from shipper.delivery.tls import is_https, tls_context

    token_url = None if endpoint.oauth2 is None else endpoint.oauth2.token_url
    if not any(map(is_https, (endpoint.base_url, endpoint.proxy, token_url))):
        return
    try:
        tls_context(endpoint, section)
    except ConfigError as error:
        findings.add("fail", error.key, error.message)
        return
    findings.add("ok", f"{section}.ca_bundle", str(endpoint.ca_bundle or "the authorities of this system"))
    if endpoint.client_certificate is not None:
        findings.add("ok", f"{section}.client_certificate", f"{endpoint.client_certificate}, with its key")


def _probe(section: str, account: int | None) -> Probe | None:
    """Choose the request; None if it is for a report and nobody said whose."""
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
        remark="a report was read, and nothing written",
        or_else=f"; or there is no account {account}",
    )
