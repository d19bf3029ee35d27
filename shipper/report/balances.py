"""
How the balances of a report hang together: hypotheses, each also with the exchange rates.

None is documented, so that one of them does not hold is no finding. It is one if the account's outgoing balance follows
from nothing: neither from its opening balance and what was earned, nor from the balances of its marketing sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Final, NamedTuple

from msgspec.structs import replace

from shipper.model import wire
from shipper.report.currencies import is_same_currency
from shipper.report.findings import Finding, comparison, shown
from shipper.report.metrics import CPA, FEES, REV_SHARE

Entries = Sequence[tuple[str, wire.MarketingSource]]  # each behind its place


_ROUNDING: Final = Decimal("0.0001")  # of a figure, to its fourth decimal
_RATE_ROUNDING: Final = Decimal("0.00005")


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
    Return for each hypothesis whether it holds, and warn of a balance that no hypothesis explains.

    Hypotheses with exchange rates are left out where every rate is 1.

    The decimal context has to have room for the exact sums and products.
    """
    has_rates = any(entry.exchange_rate not in (None, 1) for _, entry in entries)
    conversions = (_AS_THEY_ARE, *_BY_RATE) if has_rates else (_AS_THEY_ARE,)
    for conversion in conversions:
        yield from _of_account(report, entries, conversion, tolerance)
    for conversion in conversions if entries else ():
        yield _of_sources(entries, conversion, tolerance)
    if not any(_lacks_rate(report, entry) for _, entry in entries):
        yield from _not_following(report, entries, conversions, tolerance)


def _lacks_rate(report: wire.DailyReport, entry: wire.MarketingSource) -> bool:
    return not entry.exchange_rate and not is_same_currency(entry.reporting_currency, report.reporting_currency)


def _not_following(
    report: wire.DailyReport, entries: Entries, conversions: Sequence[_Conversion], tolerance: Decimal
) -> Iterator[Finding]:
    """Warn of an outgoing balance that is not what it would be in any way, with the residual of the nearest."""
    account = "the account's outgoing balance is"
    earned = [(_revenue(entry), entry) for _, entry in entries]
    balances = [(entry.outgoing_balance, entry) for _, entry in entries]
    figures = _nearest(
        "outgoing_balance_follows_from_figures",
        f"{account} its opening balance plus the revenue share, CPA and fees of its marketing sources",
        report.outgoing_balance,
        [_expected(earned, report.opening_balance, each, tolerance) for each in conversions],
    )
    sources = _nearest(
        "outgoing_balance_follows_from_sources",
        f"{account} the sum of those of its marketing sources, with or without its opening balance",
        report.outgoing_balance,
        [
            _expected(balances, opening, each, tolerance)
            for each in conversions
            for opening in (Decimal(0), report.opening_balance)
        ],
    )
    if figures is not None:
        yield figures
    if sources is not None and entries and (figures is None or figures.residual != sources.residual):
        yield sources


class _Expected(NamedTuple):
    """What a balance would be, and how far off it may be because figures and rates are rounded."""

    amount: Decimal
    slack: Decimal


def _expected(
    amounts: Sequence[tuple[Decimal | None, wire.MarketingSource]],
    opening: Decimal | None,
    conversion: _Conversion,
    tolerance: Decimal,
) -> _Expected | None:
    """Add up the opening balance and amounts; None if a figure is missing."""
    total = _sum([opening, *(_converted(amount, entry, conversion) for amount, entry in amounts)])
    if total is None:
        return None
    slack = max(tolerance, _ROUNDING * len(amounts))
    if conversion is not _AS_THEY_ARE:
        slack += sum(_rate_slack(amount, entry, conversion) for amount, entry in amounts)
    return _Expected(total, slack)


def _rate_slack(amount: Decimal | None, entry: wire.MarketingSource, conversion: _Conversion) -> Decimal:
    """Return by how much a converted amount may be off because the rate is rounded; a rate of 1 is exact."""
    rate = entry.exchange_rate
    if amount is None or not rate or rate == 1:
        return Decimal(0)
    return abs(conversion.convert(amount, rate)) * _RATE_ROUNDING / abs(rate)


def _nearest(check: str, claim: str, actual: Decimal | None, expected: Iterable[_Expected | None]) -> Finding | None:
    """Return a warning with the least residual; None if one of them holds or none can be told."""
    known = [each for each in expected if each is not None]
    if actual is None or not known or any(abs(actual - each.amount) <= each.slack for each in known):
        return None
    amount, slack = min(known, key=lambda each: abs(actual - each.amount))
    return comparison(check, claim, amount, actual, slack, if_not="warning")


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
    """Return for how many marketing sources it holds, with the figures of the one that is furthest off."""
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
