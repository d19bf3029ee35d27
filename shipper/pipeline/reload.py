"""Which settings can change while a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from shipper.config.settings import RecordsSettings, Settings

# The commands about the report read its section themselves.
_SECTIONS: Final = [name for name in Settings.__struct_fields__ if name != "report"]
# By section; the rest takes effect at the next start.
_CHANGEABLE: Final = {
    "input": ("include", "exclude"),
    "intake": ("subscription_key", "subscription_key_secondary", "token", "oauth2"),
    "records": tuple(name for name in RecordsSettings.__struct_fields__ if name != "dedupe_window"),
    "delivery": (
        "rate_limit_events_per_second",
        "poison_limit",
        "retry_initial_seconds",
        "retry_max_seconds",
        "drain",
        "drain_idle_seconds",
        "drain_timeout_seconds",
    ),
    "log": ("level",),
}


class Reloading(NamedTuple):
    """
    How settings are read again.

    Attributes:
        begin, end: Called before and after, whatever came of it.
        read: Called in a worker thread; a `ConfigError` leaves all as it was.
        apply: Called with those that are in effect from now on, for what is no business of the pipeline.
    """

    begin: Callable[[], None]
    end: Callable[[], None]
    read: Callable[[], Settings]
    apply: Callable[[Settings], None]


class Reload(NamedTuple):
    """
    Settings that were read again.

    Attributes:
        settings: Those in effect from now on.
        changed: Keys that changed, and are in effect.
        waiting: Keys that changed, and take effect at the next start.
    """

    settings: Settings
    changed: list[str]
    waiting: list[str]


def reloaded(old: Settings, new: Settings) -> Reload:
    """Take over what can change while a pipeline runs."""
    settings = new
    for section in Settings.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        if before is not None and after is not None:
            names = _CHANGEABLE.get(section, ())
            changes = {name: getattr(after, name) for name in names}
            if section == "input" and before.kafka is not None and after.kafka is not None:
                changes["kafka"] = replace(before.kafka, on_gap=after.kafka.on_gap)
            settings = replace(settings, **{section: replace(before, **changes)})
        else:
            settings = replace(settings, **{section: before})
    return Reload(settings, list(_differing(old, settings)), list(_differing(settings, new)))


def _differing(one: Any, other: Any) -> Iterator[str]:
    """Name the keys that differ; a section as a whole if only one of the two has it."""
    for section in _SECTIONS:
        before, after = getattr(one, section), getattr(other, section)
        if before is None or after is None:
            if before is not after:
                yield section
            continue
        for name in before.__struct_fields__:
            if getattr(before, name) != getattr(after, name):
                yield f"{section}.{name}"
