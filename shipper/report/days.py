"""Maps the ledger's hours, which are in UTC, to the days of a time zone."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from functools import cache, lru_cache
from typing import Final

from shipper.config.zones import OFFSETS, time_zone, zone_of_offset
from shipper.model.errors import ConfigError

_HOUR: Final = timedelta(hours=1)
_HOURS_PER_DAY: Final = 24
_CACHE_SIZE: Final = 65_536  # hours: seven years
# One zone for each set of daylight saving rules; zones with the same rules have the same days.
_DAYLIGHT_SAVING: Final = (
    *("Europe/London", "Europe/Malta", "Europe/Athens", "America/New_York", "America/Chicago", "America/Denver"),
    *("America/Los_Angeles", "America/Halifax", "Australia/Sydney", "Pacific/Auckland"),
)


class Days:
    """
    The days of a time zone.

    Args:
        option: Value of `--timezone` for the zone; None = the name.

    Attributes:
        day_of: Returns the day, `YYYY-MM-DD`, of an hour in UTC, `YYYY-MM-DDThh`. An invalid hour, which a relaxed rule
            may let pass, belongs to the day in its text. Like the methods, raises ConfigError if the zone's offset from
            UTC at that hour is not a whole number of hours.
        start_of: Returns the number of the first hour of a day, see `hour_number`.
    """

    def __init__(self, zone: tzinfo = UTC, name: str = "UTC", option: str | None = None) -> None:
        self.name = name
        self.option = option or name
        self._zone = zone
        self.day_of = lru_cache(_CACHE_SIZE)(self._day_of)
        self.start_of = lru_cache(_CACHE_SIZE)(self._start_of)

    def _day_of(self, hour: str) -> str:
        local = self._local(hour)
        return hour[:10] if local is None else local.date().isoformat()

    def today(self, now_seconds: float) -> date:
        return date.fromisoformat(self.day_of(datetime.fromtimestamp(now_seconds, UTC).strftime("%Y-%m-%dT%H")))

    def is_over(self, day: date, at_s: float) -> bool:
        """Return whether a day was over at a time, seconds since the epoch."""
        return datetime.fromtimestamp(at_s, self._zone).date() > day

    def hour_of(self, hour: str) -> str:
        """Convert an hour in UTC to the zone, with its offset."""
        local = self._local(hour)
        return hour if local is None else local.isoformat(timespec="hours").replace("+00:00", "Z")

    def _start_of(self, day: date) -> int:
        try:
            start = datetime.combine(day, time.min, self._zone).astimezone(UTC)
        except OverflowError:  # near the limits of the calendar
            return day.toordinal() * _HOURS_PER_DAY
        return start.toordinal() * _HOURS_PER_DAY + start.hour

    def _local(self, hour: str) -> datetime | None:
        try:
            instant = datetime.fromisoformat(f"{hour}:00:00+00:00")
            local = instant.astimezone(self._zone)
        except (ValueError, OverflowError):
            return None
        offset = local.utcoffset()
        if offset is None or offset % _HOUR:
            raise ConfigError(
                f"{self.name} is {_format_offset(offset or timedelta())} UTC at {hour}:00Z, which is not a whole "
                "number of hours; the ledger counts by whole UTC hours, so it cannot provide the days of that zone. "
                "Use a zone with whole hours, such as Europe/Malta or Etc/GMT-5",
                source="--timezone",
            )
        return local


@lru_cache(_CACHE_SIZE)
def hour_number(hour: str) -> int | None:
    """Return the number of an hour in UTC, `YYYY-MM-DDThh`; None if it is invalid."""
    try:
        instant = datetime.fromisoformat(f"{hour}:00:00")
    except ValueError:
        return None
    return instant.toordinal() * _HOURS_PER_DAY + instant.hour


def days_of_zone(name: str) -> Days:
    """Return the days of a time zone; raise ConfigError with similar names if it does not exist."""
    return Days(time_zone(name, source="--timezone"), name)


@cache
def days_of_offset(hours: int) -> Days:
    """Return the days of a zone with a fixed offset from UTC."""
    return Days(timezone(timedelta(hours=hours)), f"UTC{hours:+}" if hours else "UTC", zone_of_offset(hours))


def candidate_zones(first: date, last: date) -> list[Days]:
    """Return the zones that a platform may use, nearest to UTC first; those with a clock change in the range last."""
    fixed = [days_of_offset(hours) for hours in sorted(OFFSETS, key=lambda hours: (abs(hours), -hours))]
    changing = []
    for name in _DAYLIGHT_SAVING:
        with suppress(ConfigError):  # the machine's database may lack some
            changing.append(days_of_zone(name))
    hours = (last - first).days * _HOURS_PER_DAY
    return [*fixed, *(days for days in changing if days.start_of(last) - days.start_of(first) != hours)]


def _format_offset(offset: timedelta) -> str:
    minutes, seconds = divmod(int(abs(offset).total_seconds()), 60)
    text = f"{minutes // 60} h {minutes % 60} min" + (f" {seconds} s" if seconds else "")
    return f"{text} {'behind' if offset < timedelta() else 'ahead of'}"
