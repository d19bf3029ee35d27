"""`shipper status`: whether everything is delivered, what stands in the way, and how long it will take."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shipper.cli.common import (
    ConfigOption,
    LogFormatOption,
    LogLevelOption,
    SetOption,
    SettingsOptions,
    plain,
    prepare,
    reader_may_leave,
)

if TYPE_CHECKING:
    from shipper.cli.status.look import Look
    from shipper.config.settings import Settings
from shipper.model.printable import printable_json


def status(
    until: Annotated[
        str,
        typer.Option(
            "--until",
            metavar="TIME",
            help="Tell whether everything that was written up to then is settled; exit code 0 = yes, 4 = no. ISO 8601, "
            "UTC unless it says otherwise; a date alone is its end; or: now.",
        ),
    ] = "",
    watches: Annotated[bool, typer.Option("--watch", help="Look again and again, until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="S", help="Seconds between two looks of --watch.")
    ] = 1.0,
    shows_all: Annotated[bool, typer.Option("--all", help="List all inputs, not only the 20 most behind.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Tell whether everything is delivered, what stands in the way, what to do, and how long it will take.

    It works beside a shipper that runs, and without one: then it tells how the last one ended.

    Example: shipper status --until 2026-11-01T12:00:00Z
    """
    if until and watches:
        raise typer.BadParameter("--until asks once, and --watch looks again and again; leave out one of them")
    from shipper.cli.status.look import look
    from shipper.cli.status.rendering import report
    from shipper.cli.status.watching import watch

    settings = prepare(SettingsOptions(config, overrides, log_level, log_format))
    options = _options_of_state(config, overrides or ())

    def as_json(seen: Look) -> str:
        return _as_json(seen, settings, shows_all=shows_all)

    with reader_may_leave():
        if watches:
            watch(lambda: look(settings, time.time(), options), interval_s, as_json if json else None)
            return
        seen = look(settings, time.time(), options)
        if until:
            raise typer.Exit(_answer(settings, seen, until, config, json=json, shows_all=shows_all))
        lines = [as_json(seen)] if json else report(seen, str(settings.state.directory), shows_all=shows_all)
        print("\n".join(lines), flush=True)


def _as_json(seen: Look, settings: Settings, *, shows_all: bool, **others: object) -> str:
    from shipper.cli.status.look import document

    whole = document(seen, settings.state.directory, shows_all=shows_all)
    return printable_json(msgspec.json.encode({**whole, **others}).decode())


def _options_of_state(config: Path | None, overrides: Sequence[str]) -> str:
    """Repeat what leads to the same state as it was given; nothing else, as a secret may be among it."""
    given = ["--config", str(config)] if config else []
    for each in overrides:
        if each.partition("=")[0].strip().split(".")[0] == "state":
            given += ["--set", each]
    return f" {shlex.join(given)}" if given else ""


def _known_inputs(config: Path | None) -> str:
    """Say what cannot be known where no setting names the inputs."""
    from shipper.config.load import USUAL_FILES

    named = config or os.environ.get("SHIPPER_CONFIG")
    path = named or next((each for each in USUAL_FILES if each.exists()), None)
    where = f"the settings, of {plain(str(path))}," if path else "no settings file was found, and the settings"
    return f"  only inputs that were read before are known: {where} name no input.include"


def _answer(settings: Settings, seen: Look, text: str, config: Path | None, *, json: bool, shows_all: bool) -> int:
    """Answer `--until`; returns the exit code."""
    from shipper.cli.status.until import EXIT_NOT_YET, answer_lines, answer_of, moment_of

    until = moment_of(text, seen.at)
    answer = answer_of(seen, until)
    if json:
        lines = [_as_json(seen, settings, shows_all=shows_all, until=until, is_delivered=answer.is_delivered)]
    else:
        lines = answer_lines(answer, seen, shows_all=shows_all)
        if not settings.input.include:
            lines.insert(1, _known_inputs(config))
    print("\n".join(lines), flush=True)
    return 0 if answer.is_delivered else EXIT_NOT_YET
