"""The history of reports as the commands use it: opened, added to, and read."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple

from shipper.cli.common import say
from shipper.config.settings import Settings
from shipper.model.errors import ShipperError
from shipper.model.units import iso, several

if TYPE_CHECKING:
    from shipper.model import wire
    from shipper.report.changes import Change
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.history import History, Version

Status = Literal["new", "unchanged", "restated", "changed"]


class Kept(NamedTuple):
    """
    What became of a report.

    Attributes:
        status: `restated` if a documented figure differs, `changed` if only other things do.
        earlier: What the version before said, if this one says something else.
        changes: The documented fields that differ from it.
    """

    part: Part
    version: Version
    status: Status
    earlier: wire.DailyReport | None = None
    changes: tuple[Change, ...] = ()


@contextmanager
def opened(settings: Settings) -> Iterator[History]:
    """
    Open the history of the state directory.

    Raises:
        ConfigError: The directory cannot be made.
        StateError: The history cannot be used.
    """
    from shipper.report.history import History
    from shipper.report.history_file import FILE_NAME
    from shipper.state.directory import creating_nothing

    with creating_nothing(settings.state.directory, FILE_NAME), closing(History(settings.state.directory)) as history:
        yield history


@contextmanager
def opened_if_usable(settings: Settings, otherwise: str) -> Iterator[History | None]:
    """Open the history of the state directory; if it cannot be used, print what that means and yield None."""
    with ExitStack() as stack:
        history = None
        try:
            history = stack.enter_context(opened(settings))
        except ShipperError as error:
            say(f"note: {otherwise}: {error}")
        yield history


def keep(history: History, part: Part, fetched: FetchedReport) -> Kept:
    """
    Put a report into the history.

    Raises:
        StateError: It could not be kept.
    """
    from shipper.report.changes import diff

    assert fetched.fetched_at is not None, "it came from the service"
    added = history.add(part.account, *part.days, fetched.body, fetched.fetched_at)
    if not added.is_new:
        return Kept(part, added.version, "unchanged")
    versions = history.versions(part.account, *part.days)
    before = versions[: versions.index(added.version)]
    if not before:
        return Kept(part, added.version, "new")
    earlier = read(history, before[-1]).report
    changes = tuple(diff(earlier, fetched.report))
    status: Status = "restated" if any(change.is_figure for change in changes) else "changed"
    return Kept(part, added.version, status, earlier, changes)


def due_for_hook(history: History, part: Part) -> Version | None:
    """
    Return the latest version of a period if it was restated since a hook was run for it.

    Raises:
        StateError: The history cannot be read or written.
    """
    from shipper.report.changes import is_restated

    versions = history.since_hook(part.account, *part.days)
    for before, after in pairwise(versions):
        if is_restated(read(history, before).report, read(history, after).report):
            return versions[-1]
    if versions:
        history.end_hook(versions[-1])
    return None


def read(history: History, version: Version) -> FetchedReport:
    from shipper.report.document import read_report

    return read_report(history.body(version), account_id=version.account, fetched_at=version.first_fetched_at)


def in_words(kept: Kept) -> str:
    """Return in words what became of a report."""
    match kept.status:
        case "new":
            text = "new"
        case "unchanged":
            text = f"unchanged since {iso(kept.version.first_fetched_at)}"
        case "restated" | "changed":
            words = ["shipper", "report", "diff", str(kept.part.account), *map(str, kept.part.days)]
            what = "restated" if kept.status == "restated" else "document changed"
            text = f"{what}, {differing(kept.changes)}; see: {shlex.join(words)}"
    return f"{kept.part}: {text}"


def differing(changes: tuple[Change, ...]) -> str:
    """Return how many documented fields differ, in words."""
    if not changes:
        return "only undocumented fields differ"
    return several(len(changes), "field differs", "fields differ")
