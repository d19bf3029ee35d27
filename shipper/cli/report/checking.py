"""What the checks find in the reports of a command, told on stderr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Final, NamedTuple

from shipper.cli.common import say

if TYPE_CHECKING:
    from shipper.model import wire
    from shipper.report.document import FetchedReport
    from shipper.report.fetching import Part
    from shipper.report.findings import Finding

_SHOWN_PER_CHECK: Final = 10


class Told(NamedTuple):
    """A finding in words."""

    finding: Finding
    text: str


class Checked(NamedTuple):
    """
    A report that was checked by itself.

    Attributes:
        head: The report without its brands, to be compared with its neighbours.
    """

    part: Part
    head: wire.DailyReport
    findings: list[Finding]


def check(
    part: Part, fetched: FetchedReport, tolerance: Decimal, *, earlier: wire.DailyReport | None = None
) -> Checked:
    """
    Check a report by itself.

    Args:
        earlier: What was fetched before for the same part, if it says something else.
    """
    from msgspec.structs import replace

    from shipper.report.checks import check_merged, check_report

    report = fetched.report
    findings = check_report(report, requested=part.days, earlier_version=earlier, tolerance=tolerance)
    return Checked(part, replace(report, brands=[]), [*check_merged(fetched.merged), *findings])


def in_words(reports: Sequence[Checked], tolerance: Decimal, *, has_infos: bool) -> list[Told]:
    """
    List what was found, also in comparing each report with the one of the days before.

    Args:
        reports: Those of one account stand together, their periods ascend.
        has_infos: Bring also what only informs.
    """
    from shipper.report.checks import check_opening_balance
    from shipper.report.wording import clean

    told = []
    for before, each in zip([None, *reports], reports, strict=False):
        findings = each.findings
        if before is not None and _follows(each.part, before.part):
            findings = [*findings, check_opening_balance(each.head, before.head, tolerance)]
        for finding in findings:
            where = f" {finding.where}:" if finding.where else ""
            if has_infos or finding.severity != "info":
                told.append(Told(finding, clean(f"{each.part}:{where} {finding.message}")))
    return told


def tell(findings: Sequence[Told], *, is_full: bool) -> bool:
    """
    Print findings, and say whether any calls for a look.

    Args:
        is_full: Otherwise of one check no more than the first few: what does not hold in one report may hold in none.
    """
    times = Counter[str]()
    for told in findings:
        times[told.finding.check] += 1
        if is_full or times[told.finding.check] <= _SHOWN_PER_CHECK:
            say(f"{told.finding.severity}: {told.text}")
    for check, count in times.items():
        if not is_full and count > _SHOWN_PER_CHECK:
            say(f"{count - _SHOWN_PER_CHECK:,} more findings of {check}; --checks shows all")
    return any(told.finding.severity in {"error", "warning"} for told in findings)


def tell_unknown(fields: Iterable[tuple[str, ...]]) -> None:
    """Name the fields that are not documented, each once."""
    from shipper.report.wording import clean

    names = dict.fromkeys(clean(name) for each in fields for name in each)
    if names:
        say(f"note: fields that are not documented, which --format json alone shows: {', '.join(names)}")


def _follows(part: Part, before: Part) -> bool:
    return part.account == before.account and part.days.start - before.days.end == timedelta(days=1)
