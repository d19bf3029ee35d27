"""Options and arguments of the report commands: accounts and days, how to fetch, what to check."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from shipper.model.errors import SourceError

if TYPE_CHECKING:
    from shipper.report.fetching import Part
    from shipper.report.ranges import DateRange, Split

_ACCOUNT_MAX: Final = 2**63 - 1
_CONCURRENCY_MAX: Final = 64
_PERIOD: Final = "yesterday, 2026-10, last-month, this-month, today or 2026-10-31"

WordsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[ACCOUNT] START [END]",
        show_default=False,
        help=f"The number of an affiliate account, and two days, YYYY-MM-DD, both included; or one period: {_PERIOD}. "
        "Without ACCOUNT, the accounts are those of --account and --accounts-file.",
    ),
]
AccountArgument = Annotated[
    int, typer.Argument(min=1, max=_ACCOUNT_MAX, metavar="ACCOUNT", help="The number of the affiliate account.")
]
StartArgument = Annotated[
    str, typer.Argument(metavar="START", help=f"The first day, YYYY-MM-DD; or, without END, a period: {_PERIOD}.")
]
OptionalStartArgument = Annotated[
    str,
    typer.Argument(
        metavar="START",
        show_default="all days",
        help=f"The first day, YYYY-MM-DD; or, without END, a period: {_PERIOD}.",
    ),
]
EndArgument = Annotated[str, typer.Argument(metavar="END", show_default=False, help="The last day, included.")]
AccountsOption = Annotated[
    list[str] | None, typer.Option("--account", metavar="N", help="A further account; may be repeated.")
]
AccountsFileOption = Annotated[
    str, typer.Option("--accounts-file", metavar="FILE", help="Further accounts, one per line; - for stdin.")
]
SplitOption = Annotated[
    Literal["month", "day", "none"],
    typer.Option(
        "--split",
        metavar="PERIOD",
        help="month or day: one report for each (some services refuse longer ones); none: one of all days.",
    ),
]
ConcurrencyOption = Annotated[
    int, typer.Option("--concurrency", min=1, max=_CONCURRENCY_MAX, metavar="N", help="Maximum requests in flight.")
]
RequestRateOption = Annotated[
    float, typer.Option("--rate", min=0, metavar="N", help="Maximum requests per second; 0 = no limit.")
]
AllowPartialOption = Annotated[
    bool, typer.Option("--allow-partial", help="Replace the file of --output even if a report could not be fetched.")
]
ChecksOption = Annotated[bool, typer.Option("--checks", help="Also show the checks that hold or could not be decided.")]
StrictOption = Annotated[bool, typer.Option("--strict", help="Exit with 3 if a check finds anything wrong.")]
ToleranceOption = Annotated[
    str,
    typer.Option("--tolerance", metavar="AMOUNT", help="Difference up to which the checks treat two amounts as equal."),
]


def selected(words: Sequence[str], accounts: Sequence[str] | None, accounts_file: str, split: Split) -> list[Part]:
    """
    List the reports that a command line asks for.

    Args:
        words: `[ACCOUNT] START [END]`.
    Raises:
        typer.BadParameter: A word is none that belongs there, or no account is named.
        SourceError: The file of accounts cannot be read, or holds something else.
    """
    from shipper.report.fetching import parts_of

    has_account = len(words) > 2 or re.fullmatch("[0-9]+", words[0]) is not None
    first, period = (words[:1], words[1:]) if has_account else ([], words)
    if not 1 <= len(period) <= 2:
        raise typer.BadParameter(
            "give ACCOUNT START END, such as 1001 2026-10-01 2026-10-31; or a period, such as 1001 2026-10; "
            "or the same without ACCOUNT, with --account or --accounts-file"
        )
    days = days_between(period[0], "".join(period[1:]))
    wanted = [_account(word) for word in (*first, *(accounts or ()))]
    if accounts_file:
        wanted += _accounts_of(accounts_file)
    if not wanted:
        raise typer.BadParameter("name an account: ACCOUNT before the period, --account or --accounts-file")
    return parts_of(wanted, *days, split)


def days_between(start: str, end: str = "", today: date | None = None) -> DateRange:
    """
    Read START and END.

    Args:
        start: A day, or any period if `end` is empty.
        today: None = that of UTC.
    Raises:
        typer.BadParameter: They are none, or in the wrong order.
    """
    from shipper.report.ranges import DateRange, period_of

    today = datetime.fromtimestamp(time.time(), UTC).date() if today is None else today
    named = ((start, "START"), (end or start, "END"))
    first, last = (_found(period_of(word, today), word, name) for word, name in named)
    if first.start > last.end:
        raise typer.BadParameter(f"START {start} is after END {end}")
    return DateRange(first.start, last.end)


def _found(found: DateRange | None, word: str, name: str) -> DateRange:
    if found is None:
        raise typer.BadParameter(f"{word!r} is not a date or a period, such as {_PERIOD}", param_hint=name)
    return found


def tolerance_of(text: str) -> Decimal:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount < 0:
        raise typer.BadParameter(f"{text!r} is not an amount, such as 0.01", param_hint="--tolerance")
    return amount


def _account(word: str) -> int:
    number = _number(word)
    if number is None:
        raise typer.BadParameter(f"{word!r} is not an account number")
    return number


def _number(word: str) -> int | None:
    """Read an account's number; None if it is none."""
    is_number = re.fullmatch(r"[0-9]{1,19}", word) is not None and 1 <= int(word) <= _ACCOUNT_MAX
    return int(word) if is_number else None


def _accounts_of(file: str) -> list[int]:
    """Read the numbers of a file; a line may be empty, or end with a comment behind `#`."""
    try:
        text = sys.stdin.read() if file == "-" and sys.stdin else Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file}: cannot be read as a list of accounts ({error})") from None
    numbers = []
    for number, line in enumerate(text.removeprefix("\N{BOM}").splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if word:
            account = _number(word)
            if account is None:
                raise SourceError(f"{file}:{number}: {word!r} is not an account number; write one per line")
            numbers.append(account)
    if not numbers:
        raise SourceError(f"{file}: has no account numbers; write one per line")
    return numbers
