"""`shipper status` of a Kafka consumer group."""

from __future__ import annotations

import msgspec

from shipper.cli.common import in_columns, plain, print_json, reader_may_leave, several
from shipper.config.settings import KafkaSettings
from shipper.kafka.look import GroupLook, look_at_group
from shipper.model.units import iso


def show_group(settings: KafkaSettings, at: float, until: float | None, *, is_json: bool) -> bool:
    """
    Print how far the group is.

    Args:
        at: The time, seconds since the epoch.
        until: Also answer whether everything up to then is settled.
    Returns:
        Whether it is.
    Raises:
        SourceError: The brokers cannot be asked.
    """
    seen = look_at_group(settings, at, until)
    with reader_may_leave():
        if is_json:
            answer = {} if until is None else {"is_delivered": seen.is_delivered}
            document = {**msgspec.to_builtins(seen), "lag_records": seen.lag_records, **answer}
            print_json(msgspec.json.encode(document))
        else:
            print(plain("\n".join([*_answer(seen), *_lines(seen)])), flush=True)
    return seen.is_delivered


def _answer(seen: GroupLook) -> list[str]:
    if seen.until is None:
        return []
    if seen.is_delivered:
        return [f"yes: everything that was written up to {iso(seen.until)} is delivered"]
    why = f"; not known of {', '.join(seen.late)}" if seen.late else ""
    return [f"no: it is not known that everything that was written up to {iso(seen.until)} is settled{why}"]


def _lines(seen: GroupLook) -> list[str]:
    head = (
        f"group {seen.group}: {seen.state}, {several(seen.members, 'member')}, "
        f"{several(len(seen.partitions), 'partition')}, {several(seen.lag_records, 'record')} behind"
    )
    rows = [["Partition", "Settled to", "End", "Lag", "Delivered until"]]
    for each in seen.partitions:
        settled = "none" if each.offset is None else f"{each.offset:,}"
        until = "not known" if each.delivered_until is None else iso(each.delivered_until)
        rows.append([f"{each.topic}/{each.partition}", settled, f"{each.end or 0:,}", f"{each.lag_records:,}", until])
    return [head, "", in_columns(rows), *(each.message for each in seen.partitions if each.message)]
