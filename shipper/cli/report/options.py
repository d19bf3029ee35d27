"""The arguments and options of the report commands."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple

import typer

from shipper.cli.commands import flag, option
from shipper.model.errors import SourceError

if TYPE_CHECKING:
    from shipper.report.ranges import DateRange, Part

_ACCOUNT_MAX: Final = 2**63 - 1
_CONCURRENCY_MAX: Final = 64
_PERIOD: Final = "yesterday, 2026-10, last-month, this-month, today or 2026-10-31"
_START_HELP: Final = f"The first day, YYYY-MM-DD; or, without END, a period: {_PERIOD}."


def _parse_account(word: str) -> int | None:
    is_number = re.fullmatch(r"[0-9]{1,19}", word) is not None and 1 <= int(word) <= _ACCOUNT_MAX
    return int(word) if is_number else None


def _account_argument(word: str) -> int:
    number = _parse_account(word)
    if number is None:
        raise typer.BadParameter(f"{word!r} is not an account number; give it before the period, such as 1001 2026-10")
    return number


AccountArgument = Annotated[
    int, typer.Argument(parser=_account_argument, metavar="ACCOUNT", help="The number of the affiliate account.")
]
StartArgument = Annotated[str, typer.Argument(metavar="START", help=_START_HELP)]
OptionalStartArgument = Annotated[str, typer.Argument(metavar="START", show_default="all days", help=_START_HELP)]
EndArgument = Annotated[str, typer.Argument(metavar="END", show_default=False, help="The last day, included.")]
SplitOption = Annotated[
    Literal["month", "day", "none"],
    option(
        "PERIOD",
        "month or day: one report for each (some services refuse longer periods); none: one report for all days.",
    ),
]
AllowPartialOption = Annotated[
    bool, flag("Replace the file of --output even if a report could not be fetched.", "--allow-partial")
]


class PartsOptions(NamedTuple):
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[ACCOUNT] START [END]",
            show_default=False,
            help="An account number and two days, YYYY-MM-DD, both included; or one period: "
            f"{_PERIOD}. Without ACCOUNT, use --account or --accounts-file.",
        ),
    ]
    accounts: Annotated[list[str] | None, option("N", "Another account; can be repeated.", "--account")] = None
    accounts_file: Annotated[str, option("FILE", "A file with account numbers, one per line; - for stdin.")] = ""
    split: SplitOption = "month"

    def parts(self) -> list[Part]:
        return self.selector()()

    def selector(self) -> Callable[[], list[Part]]:
        """Return a function that returns the selected reports as of now; the accounts are read only once."""
        from shipper.report.ranges import parts_of

        has_account = len(self.words) > 2 or re.fullmatch("[0-9]+", self.words[0]) is not None
        account, period = (self.words[:1], self.words[1:]) if has_account else ([], self.words)
        if not 1 <= len(period) <= 2:
            raise typer.BadParameter(
                "give ACCOUNT START END, such as 1001 2026-10-01 2026-10-31; or a period, such as 1001 2026-10; "
                "or the same without ACCOUNT, with --account or --accounts-file"
            )
        accounts = []
        for word in (*account, *(self.accounts or ())):
            number = _parse_account(word)
            if number is None:
                raise typer.BadParameter(f"{word!r} is not an account number")
            accounts.append(number)
        if self.accounts_file:
            accounts += _read_accounts(self.accounts_file)
        if not accounts:
            raise typer.BadParameter("name an account: ACCOUNT before the period, --account or --accounts-file")
        return lambda: parts_of(accounts, days_between(period[0], "".join(period[1:])), self.split)


class RequestOptions(NamedTuple):
    concurrency: Annotated[int, option("N", "Maximum requests in flight.", min=1, max=_CONCURRENCY_MAX)] = 4
    rate: Annotated[float, option("N", "Maximum requests per second; 0 = no limit.", min=0)] = 0.0


class CheckOptions(NamedTuple):
    checks: Annotated[bool, flag("Also show checks that passed or were not possible.", "--checks")] = False
    strict: Annotated[bool, flag("Exit with 3 if a check fails.", "--strict")] = False
    tolerance: Annotated[str, option("AMOUNT", "Largest difference between amounts that count as equal.")] = "0.01"

    def amount(self) -> Decimal:
        """Parse the tolerance; raise typer.BadParameter if it is not an amount."""
        try:
            amount = Decimal(self.tolerance)
        except InvalidOperation:
            amount = Decimal("NaN")
        if not amount.is_finite() or amount < 0:
            raise typer.BadParameter(f"{self.tolerance!r} is not an amount, such as 0.01", param_hint="--tolerance")
        return amount


def days_between(start: str, end: str = "", today: date | None = None) -> DateRange:
    """Parse START, which may be any period, and END; `today` defaults to the date in UTC."""
    from shipper.report.ranges import DateRange, parse_period

    today = datetime.fromtimestamp(time.time(), UTC).date() if today is None else today
    periods = []
    for word, name in ((start, "START"), (end or start, "END")):
        period = parse_period(word, today)
        if period is None:
            raise typer.BadParameter(f"{word!r} is not a date or a period, such as {_PERIOD}", param_hint=name)
        periods.append(period)
    first, last = periods
    if first.start > last.end:
        raise typer.BadParameter(f"START {start} is after END {end}")
    return DateRange(first.start, last.end)


def _read_accounts(file: str) -> list[int]:
    """Read account numbers from a file; lines may be empty or end with a comment after `#`."""
    try:
        text = sys.stdin.read() if file == "-" and sys.stdin else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file}: cannot be read as a list of account numbers ({error})") from None
    accounts = []
    for number, line in enumerate(text.removeprefix("\N{BOM}").splitlines(), start=1):
        if word := line.partition("#")[0].strip():
            account = _parse_account(word)
            if account is None:
                raise SourceError(f"{file}:{number}: {word!r} is not an account number; write one per line")
            accounts.append(account)
    if not accounts:
        raise SourceError(f"{file} has no account numbers; write one per line")
    return accounts
