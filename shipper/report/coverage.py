"""What is missing of the reports that were asked for: told at the top of every form, and beside every total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from shipper.model import wire
from shipper.report.fetching import Part
from shipper.report.wording import period


class Coverage(NamedTuple):
    """
    Attributes:
        asked: All that were asked for.
        missing: Those that could not be fetched, in their order.
    """

    asked: Sequence[Part] = ()
    missing: Sequence[Part] = ()

    def of(self, account: int) -> str:
        """Return `2 of 3 periods; September 2026 is missing`; empty if nothing is."""
        missing = [part for part in self.missing if part.account == account]
        if not missing:
            return ""
        asked = Counter(part.account for part in self.asked)[account]
        days = ", ".join(map(_days, missing))
        return f"{asked - len(missing):,} of {asked:,} periods; {days} {'is' if len(missing) == 1 else 'are'} missing"

    def lines(self) -> list[str]:
        """Say of each account what is missing, if anything is."""
        return [f"Incomplete: account {each}, {self.of(each)}." for each in _accounts(self.missing)]

    def as_json(self) -> list[dict[str, Any]]:
        """List what is missing."""
        return [{"account_id": part.account, "start": part.days.start, "end": part.days.end} for part in self.missing]


WHOLE: Final = Coverage()


def _days(part: Part) -> str:
    start, end = part.days
    return period(wire.ReportingPeriod(f"{start}T00:00:00", f"{end}T23:59:59"))


def _accounts(parts: Iterable[Part]) -> list[int]:
    return list(dict.fromkeys(part.account for part in parts))
