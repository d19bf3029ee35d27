"""`shipper status`: whether everything is delivered, what prevents it, and how long it will take."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from shipper.cli.common import (
    SettingsOptions,
    format_option,
    parsed_time,
    plain,
    prepare,
    reader_may_leave,
    with_settings_options,
)
from shipper.model.printable import printable_json

if TYPE_CHECKING:
    from shipper.status.snapshot import Snapshot

_EXIT_NOT_YET: Final = 4


@with_settings_options
def status(
    until: Annotated[
        str,
        typer.Option(
            "--until",
            metavar="TIME",
            help="Check whether everything that was written up to then is settled; exit code 0 = yes, 4 = no. ISO "
            "8601, UTC unless it says otherwise; a date alone is its end; or: now.",
        ),
    ] = "",
    watches: Annotated[bool, typer.Option("--watch", help="Repeat until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.1, metavar="S", help="Seconds between two updates of --watch.")
    ] = 1.0,
    shows_all: Annotated[bool, typer.Option("--all", help="List all inputs, not only the 20 most behind.")] = False,
    form: Annotated[Literal["text", "json"], format_option("text, or json: one object.", "--json")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show whether everything is delivered, what prevents it, what to do, and how long it will take.

    Works with and without a running shipper; without one, it shows how the last one ended. With input.kafka, it
    asks the brokers about the whole group.

    Example: shipper status --until 2026-11-01T12:00:00Z
    """
    is_json = form == "json"
    if until and watches:
        raise typer.BadParameter("--until and --watch cannot be combined; leave out one of them")
    from shipper.cli.status.rendering import LISTED, answer, report
    from shipper.cli.status.watching import watch
    from shipper.status.snapshot import take_snapshot

    settings = prepare(options)
    if settings.input.kafka is not None:
        from shipper.cli.status.group import show_group

        if watches:
            raise typer.BadParameter(
                "--watch is for a state directory; leave it out, or look at the status page of a member"
            )
        moment = parsed_time(until, is_end=True, now=time.time()) if until else None
        is_delivered = show_group(settings.input.kafka, time.time(), moment, is_json=is_json)
        raise typer.Exit(0 if moment is None or is_delivered else _EXIT_NOT_YET)
    shell_options = _options_of_state(options.config, options.overrides or ())
    limit = None if shows_all else LISTED

    def look() -> Snapshot:
        return take_snapshot(settings, time.time())

    with reader_may_leave():
        if watches:
            watch(look, interval_s, shell_options, (lambda seen: _as_json(seen, limit)) if is_json else None)
            return
        seen = look()
        moment = parsed_time(until, is_end=True, now=seen.at) if until else None
        if moment is None:
            lines = [_as_json(seen, limit)] if is_json else report(seen, settings.state.directory, shell_options, limit)
        elif is_json:
            lines = [_as_json(seen, limit, until=moment, is_delivered=seen.is_delivered(moment))]
        else:
            lines = answer(seen, moment, limit, "" if settings.input.include else _known_inputs(options.config))
        print("\n".join(lines), flush=True)
        if moment is not None and not seen.is_delivered(moment):
            raise typer.Exit(_EXIT_NOT_YET)


def _as_json(seen: Snapshot, limit: int | None, **answer: object) -> str:
    from shipper.status.document import document

    outside = {"delivered_until": seen.delivered_until, "beside": seen.beside}
    return printable_json(msgspec.json.encode({**document(seen, limit), **outside, **answer}).decode())


def _options_of_state(config: Path | None, overrides: Sequence[str]) -> str:
    """Return the given options that select the state; no others, as they may hold a secret."""
    given = ["--config", str(config)] if config else []
    for each in overrides:
        if each.partition("=")[0].strip().split(".")[0] == "state":
            given += ["--set", each]
    return f" {shlex.join(given)}" if given else ""


def _known_inputs(config: Path | None) -> str:
    """Explain why inputs that were never read are not known."""
    from shipper.config.load import USUAL_FILES

    named = config or os.environ.get("SHIPPER_CONFIG")
    path = named or next((each for each in USUAL_FILES if os.path.exists(each)), None)
    where = f"{plain(str(path))}: " if path else "no settings file was found, and "
    return f"  only inputs that were read before are known; {where}input.include is missing"
