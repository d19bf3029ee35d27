"""The days of a time zone, put together from the ledger's hours, which are hours of UTC."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from functools import cache, lru_cache
from typing import Final

from shipper.config.zones import OFFSETS, time_zone, zone_of_offset
from shipper.model.errors import ConfigError

_HOUR: Final = timedelta(hours=1)
_HOURS_OF_DAY: Final = 24
_KEPT: Final = 65_536  # hours of seven years
# One of each way in which clocks change for the summer; zones that change alike have the same days.
_CHANGING: Final = (
    *("Europe/London", "Europe/Malta", "Europe/Athens", "America/New_York", "America/Chicago", "America/Denver"),
    *("America/Los_Angeles", "America/Halifax", "Australia/Sydney", "Pacific/Auckland"),
)


class Days:
    """
    Tells which day an hour lies in.

    Args:
        name: For messages and readers.
        option: What `--timezone` takes for it; None = the name.

    Attributes:
        start_of: Takes a day, and returns the hour of UTC that it begins with, counted as `hour_number` does.
    """

    def __init__(self, zone: tzinfo = UTC, name: str = "UTC", option: str | None = None) -> None:
        self.name = name
        self.option = option or name
        self._zone = zone
        self.day_of = lru_cache(_KEPT)(self._day_of)
        self.start_of = lru_cache(_KEPT)(self._start_of)

    def __repr__(self) -> str:
        return f"<Days of {self.name}>"

    def _day_of(self, hour: str) -> str:
        """
        Return the day, `YYYY-MM-DD`, of an hour of UTC, `YYYY-MM-DDThh`.

        An hour that no calendar has, as a relaxed rule lets it pass, is of the day that it names.

        Raises:
            ConfigError: The zone is then no whole number of hours apart from UTC.
        """
        local = self._local(hour)
        return hour[:10] if local is None else local.date().isoformat()

    def today(self, now_seconds: float) -> date:
        """Return the day that it is, `now_seconds` since the epoch; raises as `day_of` does."""
        return date.fromisoformat(self.day_of(datetime.fromtimestamp(now_seconds, UTC).strftime("%Y-%m-%dT%H")))

    def hour_of(self, hour: str) -> str:
        """Write an hour of UTC as one of the zone, with its offset; raises as `day_of` does."""
        local = self._local(hour)
        return hour if local is None else local.isoformat(timespec="hours").replace("+00:00", "Z")

    def _start_of(self, day: date) -> int:
        try:
            start = datetime.combine(day, time.min, self._zone).astimezone(UTC)
        except OverflowError:  # at the ends of the calendar
            return day.toordinal() * _HOURS_OF_DAY
        return start.toordinal() * _HOURS_OF_DAY + start.hour

    def _local(self, hour: str) -> datetime | None:
        try:
            instant = datetime.fromisoformat(f"{hour}:00:00+00:00")
            local = instant.astimezone(self._zone)
        except (ValueError, OverflowError):
            return None
        offset = local.utcoffset()
        if offset is None or offset % _HOUR:
            raise ConfigError(
                f"{self.name} is {_in_words(offset or timedelta())} UTC at {hour}:00Z, no whole number of hours; "
                "the ledger keeps its counts by whole hours of UTC, so the days of that zone cannot be put together. "
                "Name a zone that is whole hours apart, such as Europe/Malta or Etc/GMT-5",
                source="--timezone",
            )
        return local


@lru_cache(_KEPT)
def hour_number(hour: str) -> int | None:
    """Count the hours up to an hour of UTC, `YYYY-MM-DDThh`; None if no calendar has it."""
    try:
        instant = datetime.fromisoformat(f"{hour}:00:00")
    except ValueError:
        return None
    return instant.toordinal() * _HOURS_OF_DAY + instant.hour


def days_of_zone(name: str) -> Days:
    """
    Read the name of a time zone.

    Raises:
        ConfigError: It is none; says which may be meant.
    """
    return Days(time_zone(name, source="--timezone"), name)


@cache
def days_of_offset(hours: int) -> Days:
    """Make the days of a place that is whole hours apart from UTC, all year round."""
    return Days(timezone(timedelta(hours=hours)), f"UTC{hours:+}" if hours else "UTC", zone_of_offset(hours))


def clocks(first: date, last: date) -> list[Days]:
    """List the clocks that a platform may count some days by: the nearest to UTC first, those that change then last."""
    fixed = [days_of_offset(hours) for hours in sorted(OFFSETS, key=lambda hours: (abs(hours), -hours))]
    changing = []
    for name in _CHANGING:
        with suppress(ConfigError):  # a machine may not know all of them
            changing.append(days_of_zone(name))
    hours = (last - first).days * _HOURS_OF_DAY
    return [*fixed, *(days for days in changing if days.start_of(last) - days.start_of(first) != hours)]


def _in_words(offset: timedelta) -> str:
    minutes, seconds = divmod(int(abs(offset).total_seconds()), 60)
    written = f"{minutes // 60} h {minutes % 60} min" + (f" {seconds} s" if seconds else "")
    return f"{written} {'behind' if offset < timedelta() else 'ahead of'}"
