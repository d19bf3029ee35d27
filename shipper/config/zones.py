"""Time zones by name, with suggestions for unknown names."""

from __future__ import annotations

import re
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from shipper.model.errors import ConfigError

OFFSETS: Final = range(-12, 15)  # from UTC, hours; all that are in use

_OFFSET: Final = re.compile(r"(?:UTC|GMT)?([+-]\d\d?)(?::?00)?", re.ASCII | re.IGNORECASE)
_ABBREVIATION_MAX: Final = 4  # letters, such as CEST; similar ones are other zones, so do not suggest them


def time_zone(name: str, *, key: str = "", source: str = "") -> ZoneInfo:
    """Return a time zone; raise ConfigError, with a similar name, if it is unknown."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(f"{name!r} is not a known time zone{_hint(name)}", key=key, source=source) from None


def zone_of_offset(hours: int) -> str:
    """Return the name of a fixed offset; the sign in these names is inverted."""
    return f"Etc/GMT{-hours:+}" if hours else "UTC"


def _hint(name: str) -> str:
    offset = _OFFSET.fullmatch(name)
    hours = int(offset[1]) if offset else 0
    if hours and hours in OFFSETS:
        return f"; did you mean {zone_of_offset(hours)}? The sign in these names is inverted"
    nearest = "UTC" if offset and not hours else _nearest(name)
    meant = f"; did you mean {nearest}?" if nearest else "."
    example = "UTC" if nearest else "UTC or Europe/Malta"
    return f"{meant} Use a name from the IANA database, such as {example}"


def _nearest(name: str) -> str:
    """Find a zone by a name in another case, by its city alone, or by a similar name; return "" if there is none."""
    from difflib import get_close_matches

    names: dict[str, str] = {}
    for zone in sorted(available_timezones()):
        names[zone.casefold()] = zone
        names.setdefault(zone.rpartition("/")[2].casefold(), zone)
    wanted = name.strip().replace(" ", "_").casefold()
    if wanted in names or len(wanted) <= _ABBREVIATION_MAX:
        return names.get(wanted, "")
    return "".join(names[close] for close in get_close_matches(wanted, names, n=1, cutoff=0.75))
