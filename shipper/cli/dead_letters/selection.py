"""Options that select dead letters, opening them, and messages about a selection."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from difflib import get_close_matches
from typing import Annotated, NamedTuple

import typer
from msgspec.structs import replace

from shipper.cli.commands import option
from shipper.cli.common import parse_time, say, several
from shipper.config.settings import Settings
from shipper.model.records import DeliveryClass
from shipper.state.letters import EVERYTHING, DeadLetter, Letters, Selection, open_letters

OVERSIZED = "oversized"
"""The rule of letters without the whole record, except those of empty Kafka messages."""
_DAY_S = 86_400.0


class Filters(NamedTuple):
    """The options that select dead letters; without any, all are selected."""

    reason: Annotated[str | None, option("RULE", "Only those refused by this rule.")] = None
    since: Annotated[str | None, option("TIME", "Only those refused since this time (ISO 8601, UTC by default).")] = (
        None
    )
    path: Annotated[str | None, option("GLOB", "Only those from matching inputs.")] = None
    delivery: Annotated[
        DeliveryClass | None,
        option(
            "CLASS",
            "invalid (refused here), rejected (by the service) or ambiguous (rejected, but may have been accepted).",
        ),
    ] = None

    def selection(self, older_than_days: float | None = None) -> Selection:
        for name, value in (("--reason", self.reason), ("--path", self.path)):
            if value == "":  # perhaps an empty variable in a script, which must not select all
                raise typer.BadParameter(f"{name} is empty; leave it out to select all")
        return Selection(
            rule=self.reason or "",
            since_s=None if self.since is None else parse_time(self.since),
            before_s=None if older_than_days is None else time.time() - older_than_days * _DAY_S,
            path=self.path or "",
            delivery=self.delivery or "",
        )


def letters_in(settings: Settings) -> closing[Letters]:
    """Open the dead letters; the context manager closes them."""
    return closing(open_letters(settings.state.directory))


def empty_message(selection: Selection, reasons: Collection[str] = ()) -> str:
    """Return the message for an empty selection; `reasons` are the rules of all dead letters."""
    if selection == EVERYTHING:
        return "no dead letters"
    similar = get_close_matches(selection.rule, reasons, n=1) if selection.rule not in reasons else []
    return f"no dead letters match{f'; did you mean --reason {similar[0]}?' if similar else ''}"


def report_empty(letters: Letters, selection: Selection) -> None:
    """Print a message if no dead letter is selected."""
    if not letters.count_by_rule(selection):
        say(empty_message(selection, letters.count_by_rule()))


def letter_name(letter: DeadLetter, *, is_group: bool) -> int | str:
    """Return the ID of a letter for commands. The numbers of a group's letters are those of one copy."""
    return f"{letter.path}:{letter.start_offset}" if is_group else letter.id


def group_names(letters: Letters) -> dict[int, str]:
    """Return the IDs of all letters of a group, for commands, by the id in its temporary copy."""
    return {letter.id: str(letter_name(letter, is_group=True)) for letter in letters.newest(EVERYTHING, sys.maxsize)}


def find_letters(letters: Letters, names: Sequence[str], *, is_group: bool) -> tuple[list[int], list[str]]:
    """Return the ids of the letters with these IDs, and the IDs that do not exist; reject malformed IDs."""
    found: list[int] = []
    missing = []
    for name in names:
        path, _, number = name.rpartition(":")
        if not re.fullmatch(r"[0-9]{1,18}", number) or bool(path) != is_group:
            form = "TOPIC/PARTITION:OFFSET" if is_group else "a number"
            raise typer.BadParameter(f"{name!r} is not an ID as shown by `shipper dead-letters list`: {form}")
        ids = letters.at(path, int(number)) if is_group else [int(number)] if letters.get(int(number)) else []
        found += ids
        missing += [] if ids else [name]
    return found, missing


def unknown_ids(names: Sequence[str], existing: Sequence[int]) -> typer.BadParameter:
    """Return the error for unknown IDs; it names the nearest existing ones if they are numbers."""
    numbers = [int(name) for name in names if name.isdecimal()]
    nearest = sorted({min(existing, key=lambda other: abs(other - one)) for one in numbers}) if existing else []
    near = f"; nearest: {', '.join(map(str, nearest))}" if nearest else ""
    others = f"{near}; all: shipper dead-letters list" if existing else "; there are none"
    return typer.BadParameter(f"no dead letter {', '.join(names)}{others}")


def format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{rule} {count:,}" for rule, count in counts.items())


def warn_about_truncated(letters: Letters, selection: Selection) -> bool:
    """Print the number of selected letters without the whole record; return whether there are any."""
    counts = letters.count_by_rule(replace(selection, is_whole=False))
    if count := counts.pop(OVERSIZED, 0):
        say(
            f"{several(count, 'dead letter was', 'dead letters were')} too long to be stored completely: only the "
            "beginning of the record or its position is known, so it cannot be sent or exported; see: list --reason "
            f"{OVERSIZED}"
        )
    if empty := sum(counts.values()):
        say(
            f"{several(empty, 'dead letter is', 'dead letters are')} of a message that is empty or has no value, so "
            "there is nothing to send or export"
        )
    return bool(count or empty)
