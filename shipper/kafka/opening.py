"""Make a process a member of the group that the settings name, without a state directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import NamedTuple

from shipper.config.settings import Settings
from shipper.kafka.group import Member
from shipper.kafka.ranges import Wanted
from shipper.kafka.store import TransactionStore
from shipper.kafka.topics import Topics
from shipper.model.errors import ConfigError, StateUnwritableError


class OpenGroup(NamedTuple):
    """What a pipeline of a member needs; the member joins the group once the pipeline is attached to it."""

    member: Member
    store: TransactionStore


@contextmanager
def opened_group(
    settings: Settings, *, now: Callable[[], float], wall_time: Callable[[], float], wanted: Wanted | None = None
) -> Iterator[OpenGroup]:
    """
    Connect to the brokers, and leave the group at the end.

    Args:
        now, wall_time: The clock that does not jump; seconds since the epoch.
        wanted: What to read of the topics; None = all, for ever.
    Raises:
        SourceError: What is wanted is not there.
        ConfigError: A topic is missing or unfit, a secret cannot be had, or the brokers refuse this client.
        StateUnwritableError: The brokers are away.
        StateInUseError: Another member has this one's name.
    """
    kafka, max_record_bytes = settings.input.kafka, settings.input.max_record_bytes
    assert kafka is not None
    findings = list(Topics(kafka, max_record_bytes=max_record_bytes).findings())
    wrong = [each for each in findings if each.problem]
    missing = [each for each in wrong if each.name in kafka.topics]
    if any(each.is_away for each in wrong):
        raise StateUnwritableError(f"{wrong[0].name}: {wrong[0].problem}", reason="broker_unavailable")
    if written := [each for each in wrong if each.name not in kafka.topics]:
        raise ConfigError(f"{written[0].name}: {written[0].problem}", key="input.kafka")
    if len(missing) == len(kafka.topics):
        raise ConfigError(f"{missing[0].name}: {missing[0].problem}", key="input.kafka.topics")
    member = Member(
        kafka,
        max_record_bytes=max_record_bytes,
        now=now,
        wall_time=wall_time,
        ranges=wanted and wanted.ranges(kafka),
        give_up_after_s=settings.delivery.give_up_after_seconds,
    )
    try:
        try:
            name = f"{kafka.group_id}-{kafka.group_instance_id or token_hex(6)}"
            store = TransactionStore(kafka, name, member, max_record_bytes=max_record_bytes, now=now)
        except StateUnwritableError as error:
            if error.reason == "broker_forbidden":
                raise ConfigError(str(error), key="input.kafka") from None
            raise
        yield OpenGroup(member, store)
    finally:
        member.close()
