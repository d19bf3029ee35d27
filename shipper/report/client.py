"""Where the daily report lies. Fetching it is the endpoint's work."""

from __future__ import annotations

from datetime import date

from shipper import wire
from shipper.report.ranges import check_order


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
    check_order(start, end)
    return wire.REPORT_PATH.format(account_id=account_id, start=start.isoformat(), end=end.isoformat())
