"""What a check of a report finds, and how two figures are compared."""

from __future__ import annotations

from decimal import Decimal
from typing import Final, Literal

from msgspec import Struct

from shipper.report.wording import clean

Severity = Literal["error", "warning", "note", "info"]

_DECIMALS_SHOWN: Final = Decimal("1e-12")  # of what a division leaves; far beyond what a figure of the service has


class Finding(Struct, frozen=True, kw_only=True):
    """
    What one check found.

    Attributes:
        check: Its name, such as `outgoing_balance_of_account`.
        severity: `error` and `warning` call for a look; `note` has a usual cause; `info` tells what could be told.
        where: The place in the document, as in `brands[id=11].marketingSources[id=50121]`; empty for the account.
        message: For a reader, without the place.
        expected: What would have been right.
        actual: What is there.
        residual: `actual - expected`, where both are figures.
    """

    check: str
    severity: Severity
    where: str = ""
    message: str
    expected: Decimal | str | None = None
    actual: Decimal | str | None = None
    residual: Decimal | None = None

    def text(self, days: object) -> str:
        """Return the message with its place, for a terminal; `days` names the report."""
        return clean(f"{days}:{f' {self.where}:' if self.where else ''} {self.message}")


def comparison(
    check: str,
    claim: str,
    expected: Decimal | None,
    actual: Decimal | None,
    tolerance: Decimal,
    *,
    where: str = "",
    if_not: Severity = "info",
) -> Finding:
    """
    Return whether a claim holds, as a finding.

    Args:
        claim: That both are the same, in words.
        expected: None if a figure that it needs is missing.
        actual: The same.
        tolerance: Up to here, they are the same.
        if_not: The severity if the claim does not hold.
    """
    if expected is None or actual is None:
        return Finding(
            check=check, severity="info", where=where, message=f"{claim}: cannot be told, a figure is missing"
        )
    residual = actual - expected
    holds = abs(residual) <= tolerance
    return Finding(
        check=check,
        severity="info" if holds else if_not,
        where=where,
        message=f"{claim}: {'holds' if holds else f'does not hold by {shown(residual)}'}",
        expected=rounded(expected),
        actual=rounded(actual),
        residual=rounded(residual),
    )


def rounded(value: Decimal) -> Decimal:
    """Round to twelve decimals, if there are more."""
    exponent = value.as_tuple().exponent
    return value.quantize(_DECIMALS_SHOWN) if isinstance(exponent, int) and exponent < -12 else value


def shown(value: Decimal) -> str:
    return f"{rounded(value):,f}"
