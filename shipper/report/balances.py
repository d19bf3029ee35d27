"""How the balances of a report hang together: four hypotheses, each also with the exchange rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec.structs import replace

from shipper import wire
from shipper.report.findings import Finding, comparison, shown
from shipper.report.metrics import CPA, FEES, REV_SHARE

Entries = Sequence[tuple[str, wire.MarketingSource]]  # each behind its place


class _Conversion(NamedTuple):
    """How amounts of a marketing source become amounts of the account; which way the rate goes is not documented."""

    suffix: str
    words: str
    convert: Callable[[Decimal, Decimal], Decimal]


_AS_THEY_ARE: Final = _Conversion("", "", lambda amount, _: amount)
_BY_RATE: Final = (
    _Conversion("_times_rate", ", times the exchange rate", lambda amount, rate: amount * rate),
    _Conversion("_over_rate", ", divided by the exchange rate", lambda amount, rate: amount / rate),
)


def check_balances(report: wire.DailyReport, entries: Entries, tolerance: Decimal) -> Iterator[Finding]:
    """
    Tell of each hypothesis whether it holds. Those with exchange rates are left out where every rate is 1.

    The decimal context has to have room for the exact sums and products.
    """
    has_rates = any(entry.exchange_rate not in (None, 1) for _, entry in entries)
    conversions = (_AS_THEY_ARE, *_BY_RATE) if has_rates else (_AS_THEY_ARE,)
    for conversion in conversions:
        yield from _of_account(report, entries, conversion, tolerance)
    for conversion in conversions if entries else ():
        yield _of_sources(entries, conversion, tolerance)


def _of_account(
    report: wire.DailyReport, entries: Entries, conversion: _Conversion, tolerance: Decimal
) -> Iterator[Finding]:
    earned = _sum(_converted(entry.outgoing_balance, entry, conversion) for _, entry in entries)
    sources = f"the sum of those of its marketing sources{conversion.words}"
    yield comparison(
        f"outgoing_balance_is_sources{conversion.suffix}",
        f"the account's outgoing balance is {sources}",
        earned,
        report.outgoing_balance,
        tolerance,
    )
    yield comparison(
        f"outgoing_balance_is_opening_and_sources{conversion.suffix}",
        f"the account's outgoing balance is its opening balance plus {sources}",
        _sum([report.opening_balance, earned]),
        report.outgoing_balance,
        tolerance,
    )


def _of_sources(entries: Entries, conversion: _Conversion, tolerance: Decimal) -> Finding:
    """Tell of how many marketing sources it holds, with the figures of the one that is furthest off."""
    check = f"outgoing_balance_of_source_is_revenue{conversion.suffix}"
    claim = f"a marketing source's outgoing balance is its revenue share, CPA and fees{conversion.words}"
    told = [
        comparison(
            check,
            claim,
            _converted(_revenue(entry), entry, conversion),
            entry.outgoing_balance,
            tolerance,
            where=where,
        )
        for where, entry in entries
    ]
    known = [finding for finding in told if finding.residual is not None]
    if not known:
        return replace(told[0], where="")
    furthest = max(known, key=_distance)
    holding = sum(_distance(finding) <= tolerance for finding in known)
    message = f"{claim}: holds for {holding} of {len(told)}"
    if holding < len(known):
        message += f", at the furthest not by {shown(furthest.residual or Decimal(0))}"
    if len(known) < len(told):
        message += f"; {len(told) - len(known)} cannot be told, a figure is missing"
    return replace(furthest, message=message, where=furthest.where if holding < len(known) else "")


def _distance(finding: Finding) -> Decimal:
    return abs(finding.residual or Decimal(0))


def _revenue(entry: wire.MarketingSource) -> Decimal | None:
    return _sum(metric.figure(entry).total for metric in (REV_SHARE, CPA, FEES))


def _converted(amount: Decimal | None, entry: wire.MarketingSource, conversion: _Conversion) -> Decimal | None:
    if conversion is _AS_THEY_ARE or amount is None:
        return amount
    return conversion.convert(amount, entry.exchange_rate) if entry.exchange_rate else None


def _sum(amounts: Iterable[Decimal | None]) -> Decimal | None:
    total = Decimal(0)
    for amount in amounts:
        if amount is None:
            return None
        total += amount
    return total
