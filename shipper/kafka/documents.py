"""What is written to the brokers: dead letters, rows of the ledger, and the metadata of committed offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from shipper.kafka.stream import Headers, KafkaStream, Session, schema_id
from shipper.model.records import Checkpoint, LedgerKey, Rejection
from shipper.state.affiliates import OTHER, are_identifiers
from shipper.state.ledger import is_sparse, summed
from shipper.state.ledger_upkeep import compressed, decoded

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from shipper.state.letters import DeadLetter

VERSION: Final = 1
PART: Final = "part-"
"""Begins the last word of the key of many counts together: those that hardly recur, as in `shipper.state.ledger`."""
_PART_BYTES: Final = 500_000  # brokers take a megabyte


class Document(NamedTuple):
    """A record for a topic; without a value it deletes the one that is there."""

    key: str
    value: bytes | None
    headers: Headers = ()


class Metadata(Struct, frozen=True, omit_defaults=True):
    """
    What is committed beside an offset.

    Attributes:
        topic_id: Of the topic that the offset belongs to.
        settled_until: Everything that was in the partition at this moment is settled; seconds since the epoch.
    """

    topic_id: str
    settled_until: float | None = None
    version: int = VERSION


def read_metadata(text: str | None) -> Metadata | None:
    """Read the metadata of an offset; None if it is not a shipper's."""
    try:
        return msgspec.json.decode(text or "", type=Metadata)
    except msgspec.MsgspecError:
        return None


def letter(stream: KafkaStream, rejection: Rejection, now_s: float) -> Document:
    """Make a dead letter: the message's value byte for byte, its headers, and what is wrong with it."""
    origin = stream.origin(rejection.start_offset)
    value = rejection.raw if origin.is_line else origin.value
    message = rejection.message
    if (schema := schema_id(value)) is not None:
        message = f"it has the frame of a schema registry (schema {schema}), and what is in it is not JSON"
    about: dict[str, object] = {
        **_refused(rejection, message),
        "first_at": now_s,
        "event_id": rejection.event_id,
        "consumer_id": rejection.consumer_id,
        "topic": stream.topic,
        "partition": stream.partition,
        "offset": origin.offset,
        "timestamp": origin.timestamp_ms,
        "tombstone": "true" if value is None else "",
    }
    headers = [
        *(each for each in origin.headers if not each[0].startswith("shipper.")),  # as of a letter that is read again
        *((f"shipper.{name}", str(each).encode()) for name, each in about.items() if each != ""),
    ]
    if origin.key is not None:
        headers.append(("shipper.key", origin.key))
    key = f"{stream.topic_id}/{stream.partition}/{origin.offset}"
    # Without a value, it would delete the letter from the compacted topic.
    return Document(key, b"null" if value is None else value, headers)


def refused_again(letter: DeadLetter, key: str, value: bytes, headers: Headers) -> Document:
    """Make the new version of a dead letter, of which `key`, `value` and `headers` are the old one."""
    about = {f"shipper.{name}": each for name, each in _refused(letter, letter.message).items()}
    return Document(key, value, [(name, str(about[name]).encode() if name in about else old) for name, old in headers])


def _refused(what: Rejection | DeadLetter, message: str) -> dict[str, object]:
    return {
        "rule": what.rule,
        "message": message[:4096],
        "status": what.status,
        "delivery": what.delivery,
        "attempts": what.attempts,
    }


def produce(
    producer: Producer, topic: str, documents: Iterable[Document], on_delivery: Callable[[Any, Any], None]
) -> None:
    """Put documents into a producer's queue; wait for room in it."""
    for key, value, headers in documents:
        while True:
            try:
                producer.produce(topic, value, key=key, headers=list(headers), on_delivery=on_delivery)
                break
            except BufferError:
                producer.poll(0.1)


def counted(stream: KafkaStream, checkpoints: Sequence[Checkpoint]) -> tuple[Session, list[Document]]:
    """Add what checkpoints of a stream pass to its session; return the session as it is then, and what is new of it."""
    old = stream.session
    passed = {
        "read": sum(each.read for each in checkpoints),
        "accepted": sum(each.accepted for each in checkpoints),
        "dead_lettered": sum(len(each.rejections) for each in checkpoints),
        "duplicates": sum(each.duplicates for each in checkpoints),
        "unreachable": stream.unreachable,
    }
    totals = {name: old.totals.get(name, 0) + count for name, count in passed.items()}
    prefix = f"{stream.topic_id}/{stream.partition}/{old.name}"
    sums, parts, rows = summed(checkpoints, _counted_as), old.parts, dict[LedgerKey, tuple[int, int]]()
    documents = []
    if is_sparse(sums):
        documents = [
            Document(f"{prefix}/{PART}{parts + number}", part) for number, part in enumerate(_parts(sums.columns()))
        ]
        parts += len(documents)
    elif len(sums):
        for hour, brand, affiliate, media, accepted, repeated in zip(*decoded(sums.columns()), strict=True):
            before = old.sums.get((hour, brand, affiliate, media), (0, 0))
            rows[hour, brand, affiliate, media] = before[0] + accepted, before[1] + repeated
        documents = [ledger_row(prefix, key, counts) for key, counts in rows.items()]
    end = stream.position_at(checkpoints[-1].end_offset) if checkpoints else stream.next_offset
    documents.append(totals_row(prefix, totals, topic=stream.topic, offset=end))
    return Session(old.name, totals, old.sums | rows, parts), documents


def _counted_as(affiliate: str) -> str:
    return affiliate if are_identifiers([affiliate]) else OTHER


def _parts(columns: bytes) -> list[bytes]:
    """Compress columns; in halves, as long as a part would be too large for a message."""
    data = compressed(columns)
    if len(data) <= _PART_BYTES:
        return [data]
    whole = decoded(columns)
    half = len(whole[0]) // 2
    halves = ([each[:half] for each in whole], [each[half:] for each in whole])
    return [part for each in halves for part in _parts(msgspec.msgpack.encode(each))]


def ledger_row(prefix: str, key: LedgerKey, counts: tuple[int, int]) -> Document:
    """Make a row of the ledger; `prefix` is TOPIC-ID/PARTITION/SESSION."""
    hour, brand, affiliate, media = key
    accepted, duplicates = counts
    value = msgspec.json.encode({"accepted": accepted, "duplicates": duplicates})
    return Document(f"{prefix}/{hour}/{brand}/{affiliate}/{media}", value)


def totals_row(prefix: str, totals: Mapping[str, int], *, topic: str, offset: int | None = None) -> Document:
    """Make the row with what became of all records of a session; `offset` is where it ends."""
    row = {**totals, **({} if offset is None else {"offset": offset}), "topic": topic, "version": VERSION}
    return Document(f"{prefix}/totals", msgspec.json.encode(row))
