"""Settings that can change while a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from shipper.config.settings import RecordsSettings, Settings

# Only the report commands use the section "report".
_SECTIONS: Final = [name for name in Settings.__struct_fields__ if name != "report"]
# By section; all others take effect at the next start.
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


class ReloadHooks(NamedTuple):
    """The caller's part of a reload."""

    # Called before and after a reload, whether it succeeds or not.
    begin: Callable[[], None]
    end: Callable[[], None]
    # Reads the settings; called in a worker thread. On `ConfigError`, nothing changes.
    read: Callable[[], Settings]
    apply: Callable[[Settings], None]  # called with the new settings, to apply those that do not concern the pipeline


class Reload(NamedTuple):
    """The new settings, the changed keys, and the keys whose change needs a restart."""

    settings: Settings
    changed: list[str]
    deferred: list[str]


def reload_settings(old: Settings, new: Settings) -> Reload:
    """Return the old settings with the new values of those that can change during a run."""
    settings = new
    for section in Settings.__struct_fields__:
        before, after = getattr(old, section), getattr(new, section)
        if before is not None and after is not None:
            changes = {name: getattr(after, name) for name in _CHANGEABLE.get(section, ())}
            if section == "intake" and before.base_url != after.base_url:
                changes = {}  # credentials for another address must not be sent to this one
            if section == "input" and before.kafka is not None and after.kafka is not None:
                changes["kafka"] = replace(before.kafka, on_gap=after.kafka.on_gap)
            before = replace(before, **changes)
        settings = replace(settings, **{section: before})
    return Reload(settings, list(_differing_keys(old, settings)), list(_differing_keys(settings, new)))


def _differing_keys(one: Any, other: Any) -> Iterator[str]:
    """Yield the keys that differ; only the section's name if one of the two lacks the section."""
    for section in _SECTIONS:
        before, after = getattr(one, section), getattr(other, section)
        if before is None or after is None:
            if before is not after:
                yield section
            continue
        for name in before.__struct_fields__:
            if getattr(before, name) != getattr(after, name):
                yield f"{section}.{name}"
