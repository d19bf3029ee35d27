"""
The daily report as one page of HTML that needs nothing else: no network, no script, no other file.

It is the same for the same input, light or dark as the reader has it, and prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shipper.report.fetching import WHOLE, Coverage
from shipper.report.page import sections, tables, tiles
from shipper.report.page.account import Account
from shipper.report.page.markup import Html, document, header, join, section, tag
from shipper.report.rows import Fetched, by_account
from shipper.report.wording import clean, moment, period, with_code, with_days_in_words


def render_page(fetched: Iterable[Fetched], findings: Sequence[str] = (), coverage: Coverage = WHOLE) -> str:
    """
    Make the page.

    Args:
        fetched: 1..n reports in any order, one version per account and period.
        findings: What was found in checking them, one sentence each.
        coverage: What is missing.
    Returns:
        An HTML document, to be written as UTF-8.
    """
    accounts = [
        Account(periods, coverage.of(periods[0].report.source.affiliate_account_id)) for periods in by_account(fetched)
    ]
    names = ", ".join(_name(account) for account in accounts)
    title = f"Affiliate daily report: {names}"
    missing = (
        tag("main", *(tag("p", with_days_in_words(line), class_="alert") for line in coverage.lines()))
        if coverage.missing
        else None
    )
    return document(title, missing, *(_account(account) for account in accounts), tag("footer", _findings(findings)))


def _account(account: Account) -> Html:
    parts: list[Html] = [_head(account)]
    if account.brands:
        parts += [
            tiles.key_figures(account),
            sections.registrations(account),
            sections.funnels(account),
            *sections.revenue(account),
        ]
    parts += [tables.figures(account), tables.documents(account)]
    return tag("main", *parts)


def _head(account: Account) -> Html:
    latest = account.latest.report
    restated = [period(item.report.reporting_period) for item in account.periods if item.is_restated]
    facts = {
        "Account": str(latest.source.affiliate_account_id),
        "Operator": clean(latest.source.operator_name),
        "Currency": ", ".join(_currencies(account)),
        "Made at": moment(latest.reporting_time),
        "Fetched at": moment(account.latest.fetched_at),
        "Restated": ", ".join(restated),
    }
    return header("Affiliate daily report", _name(account), _span(account), facts)


def _name(account: Account) -> str:
    source = account.latest.report.source
    return clean(source.affiliate_account_name) or f"Account {source.affiliate_account_id}"


def _span(account: Account) -> str:
    first, last = (period(account.periods[end].report.reporting_period) for end in (0, -1))
    return f"{first} to {last}, {account.covered or f'{len(account.periods)} periods'}" if account.is_series else last


def _currencies(account: Account) -> list[str]:
    entries = [entry for item in account.periods for entry in account.entries(item)]
    own = [item.report.reporting_currency for item in reversed(account.periods)]
    return [with_code(name) for name in dict.fromkeys([*own, *(entry.reporting_currency for entry in entries)])]


def _findings(findings: Sequence[str]) -> Html:
    if not findings:
        return join([])
    return section("Findings", tag("ul", *(tag("li", with_days_in_words(finding)) for finding in findings)))
