"""`shipper status`: shows whether everything is delivered, what prevents it, and how long it will take."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec
import typer

from shipper.cli.commands import flag, option
from shipper.cli.common import SettingsOptions, format_option, parse_time, plain, prepare, tolerate_closed_stdout
from shipper.model.printable import printable_json

if TYPE_CHECKING:
    from rich.console import Group

    from shipper.kafka.offsets import GroupStatus
    from shipper.status.snapshot import Snapshot

_EXIT_NOT_YET: Final = 4
_COLOURS: Final = {"good": "green", "busy": "green", "warn": "yellow"}  # other states are red
_TABLE_OVERHEAD: Final = 3  # lines of the list of inputs that are not inputs


def status(
    until: Annotated[
        str | None,
        option(
            "TIME",
            "Check whether everything written up to TIME is settled; exit code 0 = yes, 4 = no. "
            "TIME is ISO 8601, UTC by default; a date means its end; `now` is allowed.",
        ),
    ] = None,
    watches: Annotated[bool, flag("Repeat until Ctrl-C.", "--watch")] = False,
    interval_s: Annotated[float, option("S", "Seconds between two updates of --watch.", "--interval", min=0.1)] = 1.0,
    shows_all: Annotated[bool, flag("List all inputs, not only the 20 that are furthest behind.", "--all")] = False,
    form: Annotated[Literal["text", "json"], format_option("text, or json: one object.", "--json")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show whether everything is delivered; if not, what prevents it, what to do, and how long it will take.

    Works with and without a running shipper; without one, shows how the last one ended. With input.kafka, asks the
    brokers about the whole group.

    Example: shipper status --until 2026-11-01T12:00:00Z
    """
    if until is not None and watches:
        raise typer.BadParameter("--until and --watch cannot be combined; leave out one of them")
    settings = prepare(options)
    is_json = form == "json"
    now = time.time()
    until_s = None if until is None else parse_time(until, is_end=True, now=now)
    if settings.input.kafka is not None:
        if watches:
            raise typer.BadParameter(
                "--watch needs a state directory; leave it out, or use the status page of a member"
            )
        from shipper.kafka.offsets import group_status

        group = group_status(settings.input.kafka, now, until_s)
        with tolerate_closed_stdout():
            _show_group(group, until_s, _options_of_state(options.config, ()), is_json=is_json)
        raise typer.Exit(0 if until_s is None or group.is_delivered else _EXIT_NOT_YET)

    from shipper.cli.status.text import LISTED, answer_until, one_line, report
    from shipper.status.snapshot import take_snapshot

    shell_options = _options_of_state(options.config, options.overrides or ())
    limit = None if shows_all else LISTED

    def take() -> Snapshot:
        return take_snapshot(settings, time.time())

    with tolerate_closed_stdout():
        if watches:
            with suppress(KeyboardInterrupt):
                if sys.stdout.isatty() and not is_json:
                    _draw(take, interval_s, shell_options)
                while True:
                    print(_to_json(take(), limit) if is_json else one_line(take()), flush=True)
                    time.sleep(interval_s)
            return
        snapshot = take_snapshot(settings, now)
        if is_json:
            answer = {} if until_s is None else {"until": until_s, "is_delivered": snapshot.is_delivered(until_s)}
            print(_to_json(snapshot, limit, **answer), flush=True)
        elif until_s is None:
            print("\n".join(report(snapshot, settings.state.directory, shell_options, limit)), flush=True)
        else:
            note = "" if settings.input.include else _missing_include_note(options.config)
            print("\n".join(answer_until(snapshot, until_s, limit, note)), flush=True)
        if until_s is not None and not snapshot.is_delivered(until_s):
            raise typer.Exit(_EXIT_NOT_YET)


def _to_json(snapshot: Snapshot, limit: int | None, **answer: object) -> str:
    from shipper.status.document import document

    extra = {"delivered_until": snapshot.delivered_until, "beside": snapshot.beside}
    return printable_json(msgspec.json.encode({**document(snapshot, limit), **extra, **answer}).decode())


def _show_group(group: GroupStatus, until: float | None, shell_options: str, *, is_json: bool) -> None:
    """Print the progress of a consumer group, and whether everything up to `until` is settled."""
    from shipper.cli.status.text import group_lines

    if is_json:
        answer = {} if until is None else {"is_delivered": group.is_delivered}
        document = {**msgspec.to_builtins(group), "lag_records": group.lag_records, **answer}
        print(printable_json(msgspec.json.encode(document).decode()), flush=True)
    else:
        print(plain("\n".join(group_lines(group, shell_options))), flush=True)


def _options_of_state(config: Path | None, overrides: Sequence[str]) -> str:
    """Return the options that select the state directory, shell-quoted; others may contain secrets."""
    arguments = ["--config", str(config)] if config else []
    for override in overrides:
        if override.partition("=")[0].strip().split(".")[0] == "state":
            arguments += ["--set", override]
    return f" {shlex.join(arguments)}" if arguments else ""


def _missing_include_note(config: Path | None) -> str:
    """Explain why inputs that were never read are unknown."""
    from shipper.config.load import USUAL_FILES

    chosen = config or os.environ.get("SHIPPER_CONFIG")
    path = chosen or next((path for path in USUAL_FILES if os.path.exists(path)), None)
    where = f"{plain(str(path))}: " if path else "no settings file was found, and "
    return f"  only inputs that were read before are checked; {where}input.include is missing"


# --watch in a terminal --------------------------------------------------------------------------------------------


def _draw(take: Callable[[], Snapshot], interval_s: float, options: str) -> None:
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(highlight=False)
    with Screen(console=console, auto_refresh=False) as screen:
        while True:
            screen.update(view(take(), console.width, console.height, options), refresh=True)
            time.sleep(interval_s)


def view(snapshot: Snapshot, width: int, height: int, options: str = "") -> Group:
    """Lay out a snapshot for a terminal, with as many inputs as fit."""
    from rich.console import Group
    from rich.text import Text

    from shipper.cli.status.text import LISTED, figures, first_lines, storage_lines, stream_lines
    from shipper.status.headline import headline_of

    colour = _COLOURS.get(headline_of(snapshot).state, "red")
    top = [*(Text(line, colour) for line in first_lines(snapshot)), *map(Text, figures(snapshot))]
    rest = [Text(line) for line in storage_lines(snapshot, options)]
    used = sum(-(-len(text) // width) for text in (*top, *rest)) + _TABLE_OVERHEAD
    streams = stream_lines(snapshot, max(1, min(LISTED, height - used - 1)))
    return Group(*top, *(Text(line, no_wrap=True, overflow="ellipsis") for line in streams), *rest)
