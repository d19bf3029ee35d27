"""Options that select dead letters, and the store that holds them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shipper.cli.common import parsed_time, say
from shipper.config.settings import Settings
from shipper.model.records import DeliveryClass

if TYPE_CHECKING:
    from shipper.state.letters import Letters, Selection

ReasonOption = Annotated[str, typer.Option("--reason", metavar="RULE", help="Only those that broke this rule.")]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="Only those refused since an ISO date or date-time, UTC.")
]
PathOption = Annotated[str, typer.Option("--path", metavar="GLOB", help="Only those from matching inputs.")]
DeliveryOption = Annotated[
    DeliveryClass | None,
    typer.Option(
        "--delivery",
        metavar="CLASS",
        help="invalid (refused here), rejected (by the service) or ambiguous (rejected, but may have been accepted).",
    ),
]

_DAY_S = 86_400.0


def selection_of(
    reason: str = "",
    since: str = "",
    path: str = "",
    delivery: DeliveryClass | None = None,
    older_than: float | None = None,
) -> Selection:
    """
    Parse the filters of a command line; without any, all letters are selected.

    Args:
        older_than: Days.
    Raises:
        typer.BadParameter: One of them cannot be understood.
    """
    from shipper.state.letters import Selection

    return Selection(
        rule=reason,
        since_s=parsed_time(since) if since else None,
        before_s=None if older_than is None else time.time() - older_than * _DAY_S,
        path=path,
        delivery=delivery or "",
    )


@contextmanager
def opened(settings: Settings) -> Iterator[Letters | None]:
    """Open the dead letters for reading; None if there is no state yet."""
    from shipper.state.letters import open_letters

    letters = open_letters(settings.state.directory)
    try:
        yield letters
    finally:
        if letters is not None:
            letters.close()


def none_found(selection: Selection) -> str:
    """Return the sentence for an empty selection."""
    return "no dead letters" if selection == selection_of() else "no dead letters match"


def by_rule(counts: Mapping[str, int]) -> str:
    """Return the counts of `Letters.count_by_rule` as one line."""
    return ", ".join(f"{rule} {count:,}" for rule, count in counts.items())


def warn_of_cut_letters(letters: Letters, selection: Selection) -> bool:
    """Print how many letters have only a part of their record, or its position; return whether there are any."""
    count = sum(letters.count_by_rule(msgspec.structs.replace(selection, is_whole=False)).values())
    if count:
        say(
            f"{count:,} dead letters were too long to be kept whole: only the beginning of the record or its position "
            "is known, so they cannot be sent or exported; see: list --reason oversized"
        )
    return count > 0
