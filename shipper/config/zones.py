"""Time zones by name; for a name that is none, the nearest."""

from __future__ import annotations

import re
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from shipper.model.errors import ConfigError

OFFSETS: Final = range(-12, 15)  # hours ahead of UTC that are in use somewhere

_OFFSET: Final = re.compile(r"(?:UTC|GMT)?([+-]\d\d?)(?::?00)?", re.ASCII | re.IGNORECASE)
_ABBREVIATION_MAX: Final = 4  # letters, such as CEST; one that is spelt nearly alike is another zone


def time_zone(name: str, *, key: str = "", source: str = "") -> ZoneInfo:
    """
    Return the time zone of a name.

    Args:
        key: The setting that has the name.
        source: Where else it was written.
    Raises:
        ConfigError: It names none; says which may be meant.
    """
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"{name!r} is not a known time zone{_hint(name)}", key=key, source=source) from None


def zone_of_offset(hours: int) -> str:
    """Name the zone of an offset; in those names the sign is the other way round."""
    return f"Etc/GMT{-hours:+}" if hours else "UTC"


def _hint(name: str) -> str:
    offset = _OFFSET.fullmatch(name)
    hours = int(offset[1]) if offset else 0
    if hours and hours in OFFSETS:
        return f"; did you mean {zone_of_offset(hours)}? In these names the sign is the other way round"
    nearest = "UTC" if offset and not hours else _nearest(name)
    meant = f"; did you mean {nearest}?" if nearest else "."
    example = "UTC" if nearest else "UTC or Europe/Malta"
    return f"{meant} Zones are named as in the IANA database, such as {example}"


def _nearest(name: str) -> str:
    """Find the zone of a name in another case, of a city alone, or of a similar name; empty if there is none."""
    from difflib import get_close_matches

    names: dict[str, str] = {}
    for zone in sorted(available_timezones()):
        names[zone.casefold()] = zone
        names.setdefault(zone.rpartition("/")[2].casefold(), zone)
    wanted = name.strip().replace(" ", "_").casefold()
    if wanted in names or len(wanted) <= _ABBREVIATION_MAX:
        return names.get(wanted, "")
    return "".join(names[close] for close in get_close_matches(wanted, names, n=1, cutoff=0.75))
