"""Options that select dead letters, and the store that holds them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shipper.cli.common import parsed_time, say, several
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


def none_found(selection: Selection, reasons: Collection[str] = ()) -> str:
    """Return the sentence for an empty selection; `reasons` are those of all dead letters."""
    if selection == selection_of():
        return "no dead letters"
    meant = get_close_matches(selection.rule, reasons, n=1) if selection.rule not in reasons else []
    return f"no dead letters match{f'; did you mean --reason {meant[0]}?' if meant else ''}"


def no_such_letters(ids: Sequence[int], known: Sequence[int]) -> typer.BadParameter:
    """Return the error for IDs that no dead letter has, with the nearest of the known ones."""
    nearest = sorted({min(known, key=lambda each: abs(each - one)) for one in ids}) if known else []
    others = (
        f"; nearest: {', '.join(map(str, nearest))}; all: shipper dead-letters list" if nearest else "; there are none"
    )
    return typer.BadParameter(f"no dead letter {', '.join(map(str, ids))}{others}")


def by_rule(counts: Mapping[str, int]) -> str:
    """Return the counts of `Letters.count_by_rule` as one line."""
    return ", ".join(f"{rule} {count:,}" for rule, count in counts.items())


def warn_of_cut_letters(letters: Letters, selection: Selection) -> bool:
    """Print how many letters have only a part of their record, or its position; return whether there are any."""
    count = sum(letters.count_by_rule(msgspec.structs.replace(selection, is_whole=False)).values())
    if count:
        letters_were = several(count, "dead letter was", "dead letters were")
        say(
            f"{letters_were} too long to be kept whole: only the beginning of the record or its position is known, so "
            "it cannot be sent or exported; see: list --reason oversized"
        )
    return count > 0
