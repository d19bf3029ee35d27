"""
The daily report as a self-contained HTML page, without scripts, network access or other files.

The output is deterministic, follows the reader's colour scheme, and is printable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shipper.report.fetching import COMPLETE, Coverage
from shipper.report.formatting import clean, currency, moment, period, reformat_days
from shipper.report.page import charts, tables, tiles
from shipper.report.page.account import Account
from shipper.report.page.markup import Html, document, header, section, tag
from shipper.report.rows import ReportVersion, by_account, entries_of


def render_page(fetched: Iterable[ReportVersion], findings: Sequence[str] = (), coverage: Coverage = COMPLETE) -> str:
    """Render 1..n reports in any order, one version per account and period."""
    accounts = [
        Account(periods, coverage.of(periods[0].report.source.affiliate_account_id)) for periods in by_account(fetched)
    ]
    alerts = [tag("p", reformat_days(line), class_="alert") for line in coverage.lines()]
    items = [tag("li", reformat_days(finding)) for finding in findings]
    return document(
        f"Affiliate daily report: {', '.join(map(_name, accounts))}",
        tag("main", *alerts) if alerts else None,
        *map(_account, accounts),
        tag("footer", section("Findings", tag("ul", *items)) if items else None),
    )


def _account(account: Account) -> Html:
    parts: list[Html] = [_head(account)]
    if account.brands:
        parts += [
            tiles.key_figures(account),
            charts.registrations(account),
            tables.conversions(account),
            *charts.revenue(account),
        ]
    return tag("main", *parts, tables.figures(account), tables.documents(account))


def _head(account: Account) -> Html:
    latest = account.latest.report
    first, last = (period(account.periods[end].report.reporting_period) for end in (0, -1))
    span = f"{first} to {last}, {account.covered or f'{len(account.periods)} periods'}" if account.is_series else last
    names = [
        *(item.report.reporting_currency for item in reversed(account.periods)),
        *(entry.reporting_currency for item in account.periods for entry in entries_of(item.report)),
    ]
    facts = {
        "Account": str(latest.source.affiliate_account_id),
        "Operator": clean(latest.source.operator_name),
        "Currency": ", ".join(currency(name) for name in dict.fromkeys(names)),
        "Generated at": moment(latest.reporting_time),
        "Fetched at": moment(account.latest.fetched_at),
        "Restated": ", ".join(period(item.report.reporting_period) for item in account.periods if item.is_restated),
    }
    return header("Affiliate daily report", _name(account), span, facts)


def _name(account: Account) -> str:
    source = account.latest.report.source
    return clean(source.affiliate_account_name) or f"Account {source.affiliate_account_id}"
