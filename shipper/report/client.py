"""Where the daily report lies, and how an answer becomes a report. Fetching it is the endpoint's work."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Final

import msgspec
from msgspec import Raw, Struct

from shipper import wire
from shipper.errors import ReportError

_MISSPELT: Final = "affilaiteAccountId"
_SPELT_RIGHT: Final = "affiliateAccountId"

# Far beyond any amount of money. Without a bound `1e999999999` would be a valid number, and a table would write it out.
_DIGITS_MAX: Final = 30

_DOCUMENT: Final = msgspec.json.Decoder(dict[str, Raw])
_REPORT: Final = msgspec.json.Decoder(wire.DailyReport)


def report_path(account_id: int, start: date, end: date) -> str:
    """
    Make the path of the report of one account and period, to be appended to the base URL.

    Args:
        account_id: The affiliate account.
        start: First day.
        end: Last day, included.
    Raises:
        ReportError: `start` is after `end`.
    """
    if start > end:
        raise ReportError(f"the report's start {start.isoformat()} is after its end {end.isoformat()}")
    return wire.REPORT_PATH.format(account_id=account_id, start=start.isoformat(), end=end.isoformat())


def read_report(body: bytes, *, account_id: int) -> wire.DailyReport:
    """
    Read the service's answer.

    Args:
        body: The answer's body; `source.affilaiteAccountId` may also be spelt right.
        account_id: The account that was asked for.
    Raises:
        ReportError: The body is not the report (not JSON, a web page, another document, a figure out of range), or it
            is the report of another account.
    """
    if body.lstrip()[:1] == b"<":
        raise ReportError("the answer is a web page, not a report; check the report's base_url")
    try:
        report = _REPORT.decode(_with_service_spelling(body))
    except msgspec.ValidationError as error:
        raise ReportError(f"the answer is not a daily report: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(f"the answer is not JSON: {error}") from error
    if report.source.affiliate_account_id != account_id:
        raise ReportError(
            f"account {account_id} was asked for, the report is that of account {report.source.affiliate_account_id}"
        )
    _check_figures(report, "$")
    return report


def _with_service_spelling(body: bytes) -> bytes:
    """Put the misspelt name in the place of the right one; figures stay as they are written, not read as floats."""
    document = _DOCUMENT.decode(body)
    if "source" not in document:
        return body  # the decoder of the report finds the words for it
    source = msgspec.json.decode(document["source"], type=dict[str, Raw])
    if _MISSPELT in source or _SPELT_RIGHT not in source:
        return body
    source[_MISSPELT] = source.pop(_SPELT_RIGHT)
    return msgspec.json.encode({**document, "source": source})


def _check_figures(value: object, path: str) -> None:
    """
    Go through every figure of the report.

    Raises:
        ReportError: One is not finite, or has more than 30 digits before or after the point.
    """
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent
        if not isinstance(exponent, int) or value.adjusted() >= _DIGITS_MAX or exponent < -_DIGITS_MAX:
            raise ReportError(f"the answer is not a daily report: {path} is out of range")
    elif isinstance(value, Struct):
        for name, encoded_name in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
            _check_figures(getattr(value, name), f"{path}.{encoded_name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_figures(item, f"{path}[{index}]")
