"""The state of a group in the brokers: dead letters, the ledger, and the metadata of committed offsets."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from sys import intern
from typing import Any, Final, NamedTuple

import msgspec
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from msgspec import Struct

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    ConnectionErrors,
    KafkaError,
    client_properties,
    consumer_properties,
    offsets_at,
    topic_exception,
)
from shipper.kafka.stream import Headers, KafkaStream, Position, Session, explain, headers_of
from shipper.model.records import Checkpoint, LedgerKey, Rejection, consumer_id_of
from shipper.state.affiliates import OTHER, are_identifiers
from shipper.state.ledger import Columns, compress_columns, decode_columns, is_sparse, sum_checkpoints, unpack
from shipper.state.letters import DeadLetter

VERSION: Final = 1
PART: Final = "part-"
"""Key prefix (of the last segment) of a document with many counts whose keys rarely recur; see `state.ledger`."""
TOTALS: Final = "totals"
"""The last segment of the key of a `TotalsRow`."""
_is_row: Final = re.compile(
    r"((.+/\d{1,9})/[\w-]+)"
    rf"/(?:{TOTALS}|{PART}\d+|(\d{{4}}-\d\d-\d\dT\d\d)/(-?\d{{1,19}})/([^/]*)/(\d*))",
    re.ASCII,
).fullmatch
_PART_BYTES: Final = 500_000  # brokers accept a megabyte
_READ_S: Final = 15.0
_READ_COUNT: Final = 500  # messages at once, which is faster than one by one
_LETTER_FIELDS: Final = {
    f"shipper.{name}"
    for name in ("rule", "message", "status", "delivery", "attempts", "first_at", "topic", "partition", "offset")
}
_HEADER_BYTES: Final = 8  # besides name and value
_KEPT_HEADERS_BYTES: Final = 2048  # of the message, in a shortened letter


class Document(NamedTuple):
    """
    A record of a compacted topic; value None deletes the document with the key.

    Attributes:
        partition: All versions of a document must be in one. That is the first partition for all documents, because a
            partition that depends on the key would change with their number.
    """

    key: str
    value: bytes | None
    headers: Headers = ()
    partition: int = 0

    def deletion(self) -> Document:
        return Document(self.key, None, partition=self.partition)


class Metadata(Struct, frozen=True, omit_defaults=True):
    """
    The metadata committed with an offset.

    Attributes:
        topic_id: The id of the offset's topic.
        settled_until: Everything that was in the partition at this time is settled; seconds since the epoch.
        last: The position after the last settled message; the offset may be beyond it.
        mistakes: Consecutive rejections, by rule, right before the offset.
        initial_partitions: Number of partitions of the topic when the group began to read it.
        letters, ledger: The topics to which the member that committed it writes; empty = unknown.
    """

    topic_id: str
    settled_until: float | None = None
    last: Position | None = None
    mistakes: dict[str, int] = {}
    initial_partitions: int = 0
    letters: str = ""
    ledger: str = ""
    version: int = VERSION

    def text(self) -> str:
        """Return what is committed with the offset."""
        return msgspec.json.encode(self).decode()


UNKNOWN: Final = Metadata("")


class TotalsRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """
    The results for the records of a partition during one session.

    Attributes:
        offset: The end of what the session has settled; None for a replay of dead letters.
    """

    read: int
    accepted: int
    dead_lettered: int
    duplicates: int
    unreachable: int
    topic: str
    version: int
    group: str = ""
    offset: int | None = None


class Row(NamedTuple):
    """
    A document of the ledger.

    Attributes:
        session: TOPIC-ID/PARTITION/SESSION.
        partition: TOPIC-ID/PARTITION.
        totals: None if the document contains counts by key, in `columns`.
    """

    session: str
    partition: str
    totals: TotalsRow | None
    columns: Columns


class _Counts(Struct, frozen=True):
    accepted: int
    duplicates: int


def read_metadata(text: str | None) -> Metadata:
    """Parse the metadata of an offset; return `UNKNOWN` if shipper did not write it."""
    try:
        return msgspec.json.decode(text or "", type=Metadata)
    except msgspec.MsgspecError:
        return UNKNOWN


# Dead letters ---------------------------------------------------------------------------------------------------------


def letter_document(stream: KafkaStream, rejection: Rejection, now_s: float, group: str) -> Document:
    """Return a dead letter: the unchanged value of the message, its headers, and the reason."""
    origin = stream.origin(rejection.start_offset)
    value = rejection.raw if origin.is_line else origin.value
    fields: dict[str, object] = {
        **_rejection_fields(rejection, stream.explain(rejection)),
        "first_at": now_s,
        "event_id": rejection.event_id,
        "consumer_id": rejection.consumer_id,
        "topic": stream.topic,
        "partition": stream.partition,
        "offset": origin.offset,
        "timestamp": origin.timestamp_ms,
        "tombstone": "true" if value is None else "",
        "group": group,
    }
    headers = [
        # Without those of an earlier dead letter.
        *(header for header in origin.headers if not header[0].startswith("shipper.")),
        *((f"shipper.{name}", str(field).encode()) for name, field in fields.items() if field != ""),
    ]
    if origin.key is not None:
        headers.append(("shipper.key", origin.key))
    key = f"{stream.topic_id}/{stream.partition}/{origin.offset}"
    # A document without a value would delete the letter from the compacted topic.
    return Document(key, b"null" if value is None else value, headers)


def owner_of(headers: Headers) -> str | None:
    """Return the group of a dead letter; "" if it is unknown, None if this is no dead letter."""
    fields = dict(headers)
    return (fields.get("shipper.group") or b"").decode(errors="replace") if fields.keys() >= _LETTER_FIELDS else None


def is_owner(owner: str | None, group: str) -> bool:
    """Return whether a letter of `owner` belongs to a group: also that of a backfill, or of an unknown group."""
    return owner is not None and (owner in {"", group} or owner.startswith(f"{group}.backfill."))


def shortened_letter(letter: Document, limit: int) -> Document:
    """
    Return a dead letter with at most the first `limit` bytes of the value, and without a long key or long headers.

    A value that is cut cannot be sent; `shipper.whole_bytes` is its length, and the rule is `oversized`.
    """
    value = letter.value or b""
    fields = {name: field or b"" for name, field in letter.headers if _is_field(name)}
    others = [(name, other) for name, other in letter.headers if not _is_field(name)]
    if sum(len(name.encode()) + len(other or b"") + _HEADER_BYTES for name, other in others) > _KEPT_HEADERS_BYTES:
        others = []
    if len(value) > limit:
        note = f"; truncated: only its first {limit:,} of {len(value):,} bytes are stored"
        fields |= {
            "shipper.rule": b"oversized",
            "shipper.message": fields["shipper.message"] + note.encode(),
            "shipper.consumer_id": fields.get("shipper.consumer_id") or consumer_id_of(value).encode(),
            "shipper.whole_bytes": str(len(value)).encode(),
        }
    return Document(letter.key, value[:limit], [*others, *fields.items()])


def _is_field(name: str) -> bool:
    return name.startswith("shipper.") and name != "shipper.key"


def updated_letter(letter: DeadLetter, old: Document) -> Document:
    """Return the new version of a dead letter whose record was refused again in a replay."""
    message = explain(old.value) or letter.message
    fields = {f"shipper.{name}": field for name, field in _rejection_fields(letter, message).items()}
    headers = [(name, str(fields[name]).encode() if name in fields else value) for name, value in old.headers]
    return old._replace(headers=headers)


def _rejection_fields(rejection: Rejection | DeadLetter, message: str) -> dict[str, object]:
    return {
        "rule": rejection.rule,
        "message": message[:4096],
        "status": rejection.status,
        "delivery": rejection.delivery,
        "attempts": rejection.attempts,
    }


# The ledger -----------------------------------------------------------------------------------------------------------


def add_checkpoints(
    stream: KafkaStream, checkpoints: Sequence[Checkpoint], group: str
) -> tuple[Session, list[Document]]:
    """Add checkpoints of a stream to its session; return the new session and the changed documents."""
    old = stream.session
    counts = {
        "read": sum(checkpoint.read for checkpoint in checkpoints),
        "accepted": sum(checkpoint.accepted for checkpoint in checkpoints),
        "dead_lettered": sum(len(checkpoint.rejections) for checkpoint in checkpoints),
        "duplicates": sum(checkpoint.duplicates for checkpoint in checkpoints),
        "unreachable": stream.unreachable,
    }
    totals = {name: old.totals.get(name, 0) + count for name, count in counts.items()}
    prefix = f"{stream.topic_id}/{stream.partition}/{old.name}"
    sums, parts, rows = sum_checkpoints(checkpoints, ledger_affiliate), old.parts, dict[LedgerKey, tuple[int, int]]()
    documents = []
    if is_sparse(sums):
        documents = [
            Document(f"{prefix}/{PART}{parts + number}", part)
            for number, part in enumerate(_compressed_parts(sums.columns()))
        ]
        parts += len(documents)
    elif len(sums):
        for hour, brand, affiliate, media, accepted, repeated in zip(*decode_columns(sums.columns()), strict=True):
            previous = old.sums.get((hour, brand, affiliate, media), (0, 0))
            rows[hour, brand, affiliate, media] = previous[0] + accepted, previous[1] + repeated
        documents = [ledger_row(prefix, key, counts) for key, counts in rows.items()]
    offset = stream.position_at(checkpoints[-1].end_offset) if checkpoints else stream.next_offset
    documents.append(totals_row(prefix, totals, topic=stream.topic, group=group, offset=offset))
    return Session(old.name, totals, old.sums | rows, parts), documents


def ledger_affiliate(affiliate: str) -> str:
    """Return the AffiliateID for the ledger; one that is not an identifier may be a name, and becomes `OTHER`."""
    return affiliate if are_identifiers([affiliate]) else OTHER


def _compressed_parts(columns: bytes) -> list[bytes]:
    """Compress columns; split them in half while a part is too large for a message."""
    data = compress_columns(columns)
    if len(data) <= _PART_BYTES:
        return [data]
    whole = decode_columns(columns)
    half = len(whole[0]) // 2
    halves = ([column[:half] for column in whole], [column[half:] for column in whole])
    return [part for columns in halves for part in _compressed_parts(msgspec.msgpack.encode(columns))]


def ledger_row(prefix: str, key: LedgerKey, counts: tuple[int, int]) -> Document:
    """Return a ledger row; `prefix` is TOPIC-ID/PARTITION/SESSION, `counts` are accepted and duplicates."""
    hour, brand, affiliate, media = key
    value = msgspec.json.encode({"accepted": counts[0], "duplicates": counts[1]})
    return Document(f"{prefix}/{hour}/{brand}/{affiliate}/{media}", value)


def totals_row(
    prefix: str, totals: Mapping[str, int], *, topic: str, group: str, offset: int | None = None
) -> Document:
    row = TotalsRow(**totals, topic=topic, group=group, version=VERSION, offset=offset)
    return Document(f"{prefix}/{TOTALS}", msgspec.json.encode(row))


def is_totals(document: Document) -> bool:
    """Return whether a document of the ledger has the results of a session, rather than counts by key."""
    return document.key.endswith(f"/{TOTALS}")


def parse_row(document: Document) -> Row | None:
    """Parse a document of the ledger; return None if shipper did not write it."""
    match, value = _is_row(document.key), document.value or b""
    if match is None:
        return None
    session, partition, hour, brand, affiliate, media = match.groups()
    try:
        if hour is not None:
            counts = msgspec.json.decode(value, type=_Counts)
            columns: Columns = ([hour], [int(brand)], [affiliate], [media], [counts.accepted], [counts.duplicates])
            return Row(session, partition, None, columns)
        if is_totals(document):
            return Row(session, partition, msgspec.json.decode(value, type=TotalsRow), ())
        return Row(session, partition, None, unpack(value))
    except (msgspec.DecodeError, sqlite3.DatabaseError):
        return None


def ledger_offsets(settings: KafkaSettings) -> tuple[dict[tuple[str, int], int], set[str]]:
    """
    Read what the group has settled from its ledger, which does not expire, unlike committed offsets.

    Returns:
        Offsets by topic id and partition number, and the names of all topics that the group has begun to read, of which
        one may have been recreated since.
    Raises:
        KafkaException, TimeoutError: As for `read_documents`.
    """
    settled: dict[tuple[str, int], int] = {}
    topics: set[str] = set()
    # Most documents are counts by key, and their number is not limited.
    newest = {each.key: each for each in read_documents(settings, settings.ledger) if is_totals(each)}
    for document in newest.values():
        row = parse_row(document)
        if row and row.totals and row.totals.group == settings.group_id and row.totals.offset is not None:
            topic_id, _, partition = row.partition.rpartition("/")
            key = topic_id, int(partition)
            settled[key] = max(row.totals.offset, settled.get(key, 0))
            topics.add(row.totals.topic)
    return settled, topics


# Topics ---------------------------------------------------------------------------------------------------------------


def produce(
    producer: Producer, topic: str, documents: Iterable[Document], on_delivery: Callable[[Any, Any], None]
) -> None:
    """Queue documents in a producer, waiting while its queue is full."""
    for key, value, headers, partition in documents:
        while True:
            try:
                producer.produce(topic, value, key, partition, on_delivery=on_delivery, headers=list(headers))
                break
            except BufferError:
                producer.poll(0.1)


def letter_owners(settings: KafkaSettings) -> Counter[str | None]:
    """Count the stored dead letters by `owner_of`; errors as for `read_documents`."""
    owners: dict[str, str | None] = {}
    for key, value, headers, _ in read_documents(settings, settings.letters):
        if value is None:
            owners.pop(key, None)
        else:
            owner = owner_of(headers)
            owners[key] = owner and intern(owner)
    return Counter(owners.values())


def count_letters(settings: KafkaSettings) -> int:
    """Count the dead letters of a group; errors as for `read_documents`."""
    owners = letter_owners(settings)
    return sum(count for owner, count in owners.items() if is_owner(owner, settings.group_id))


def read_documents(settings: KafkaSettings, topic: str, *, is_complete: bool = False) -> Iterator[Document]:
    """
    Read a topic to its end, deletions and older versions included.

    Args:
        is_complete: Wait for transactions that are open now, which hide what was committed after they began.
    Raises:
        KafkaException: The brokers refuse, or the topic does not exist.
        TimeoutError: The brokers do not answer.
    """
    # The consumer joins no group. Do not wait for more messages at the end of a partition.
    errors = ConnectionErrors()
    config = client_properties(settings, on_error=errors) | consumer_properties(settings) | {"fetch.wait.max.ms": 10}
    with closing(Consumer(config)) as consumer, errors.explaining(settings, consumer.poll):
        metadata = consumer.list_topics(topic, _READ_S).topics[topic]
        if metadata.error is not None:
            raise topic_exception(metadata.error, topic, is_input=False)
        partitions = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in metadata.partitions]
        ends = offsets_at(AdminClient(config), partitions, OffsetSpec.latest(), _READ_S) if is_complete else {}
        consumer.assign(partitions)
        open_partitions = set(metadata.partitions)
        while open_partitions:
            first = consumer.poll(_READ_S)
            if first is None:
                raise TimeoutError(f"no answer within {_READ_S:g} s")
            for message in (first, *consumer.consume(_READ_COUNT, 0)):
                error = message.error()
                if error is None:
                    key = (message.key() or b"").decode(errors="replace")
                    headers = [_shared_header(*header) for header in headers_of([message])[0] or ()]
                    yield Document(key, message.value(), headers, message.partition() or 0)
                elif error.code() == KafkaError._PARTITION_EOF:
                    number = message.partition() or 0
                    if (message.offset() or 0) >= ends.get((topic, number), 0):
                        open_partitions.discard(number)
                elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # no right on the group is needed
                    raise KafkaException(error)


@lru_cache(1024)
def _shared_header(name: str, value: bytes | None) -> tuple[str, bytes | None]:
    """Return a header; most of those of dead letters recur, and would be half of their memory."""
    return intern(name), value
