"""What the brokers keep of a group, in a state directory, where the commands for files find it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
from confluent_kafka import OFFSET_BEGINNING, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    PURGED,
    KafkaError,
    flushed,
    outside_consumer,
    partitions_of,
    producer_properties,
    properties,
    understood,
)
from shipper.kafka.documents import PART, Document, ledger_row, produce, refused_again, totals_row
from shipper.kafka.stream import Headers
from shipper.model.records import Checkpoint, LedgerKey, Rejection, Stream, Tally
from shipper.state.affiliates import OTHER, are_identifiers
from shipper.state.ledger import read_ledger
from shipper.state.ledger_upkeep import unpacked
from shipper.state.letters import EVERYTHING, DeadLetter, open_letters
from shipper.state.store import Store

_CALL_S: Final = 15.0

Place = tuple[int, int]  # stream and offset
_Look = tuple[dict[Place, DeadLetter], Counter[LedgerKey], Counter[LedgerKey]]


class _Kept(NamedTuple):
    """The newest version of a document."""

    key: str
    value: bytes
    headers: Headers


class GroupView:
    """
    Dead letters and ledger of a group as they are at this moment, what is not committed left out.

    Args:
        directory: Where they are copied to; empty, of the caller alone.
    Raises:
        SourceError: By every method: the brokers do not do it.
    """

    def __init__(self, settings: KafkaSettings, directory: Path) -> None:
        self._settings = settings
        self._directory = directory
        both = settings.letters, settings.ledger
        with self._understood("cannot be read", f"READ on the topics {' and '.join(both)}"):
            letters, rows = (_documents(settings, topic) for topic in both)
        self._letters: dict[Place, _Kept] = {}
        self._copy(letters, rows)
        self._replay: tuple[Producer, _Look] | None = None

    def _understood(self, what: str, right: str = "") -> AbstractContextManager[None]:
        return understood(self._settings, f"dead letters and ledger of group {self._settings.group_id} {what}", right)

    def _copy(self, letters: list[_Kept], rows: list[_Kept]) -> None:
        streams: dict[str, Stream] = {}

        def stream_of(partition: str, path: str) -> Stream:  # a topic that was made again has the path of the old one
            return streams.setdefault(partition, Stream(stream_id=len(streams) + 1, kind="kafka", path=path))

        found = sorted(((*_taken_apart(kept), kept) for kept in letters), key=lambda each: each[0])
        with closing(Store(self._directory)) as store:
            for first_at, group in groupby(found, key=lambda each: each[0]):
                refused: dict[int, tuple[Stream, list[Rejection]]] = {}
                for _, path, rejection, kept in group:
                    stream = stream_of(kept.key.rpartition("/")[0], path)
                    refused.setdefault(stream.stream_id, (stream, []))[1].append(rejection)
                    self._letters[stream.stream_id, rejection.start_offset] = kept
                store.save([_passed(stream, rejections=each) for stream, each in refused.values()], first_at)
            store.save(_counted(rows, stream_of), 0.0)

    def _look(self) -> _Look:
        """Look at what is in the directory: the letters, and what was accepted and repeated."""
        letters = open_letters(self._directory)
        assert letters is not None
        with closing(letters):
            newest = letters.newest(EVERYTHING, len(self._letters) or 1)
        accepted: Counter[LedgerKey] = Counter()
        repeated: Counter[LedgerKey] = Counter()
        for row in read_ledger(self._directory):
            affiliate = row.affiliate_id if are_identifiers([row.affiliate_id]) else OTHER
            key = row.hour, row.brand_id, affiliate, row.media
            accepted[key] += row.accepted
            repeated[key] += row.duplicates
        return {(each.stream_id, each.start_offset): each for each in newest}, accepted, repeated

    def delete(self, letters: Iterable[DeadLetter]) -> None:
        """Delete dead letters; their bytes go when the brokers compact the topic."""
        deleted = [Document(self._letters[each.stream_id, each.start_offset].key, None) for each in letters]
        with self._understood("cannot be written"):
            _write(Producer(properties(self._settings)), {self._settings.letters: deleted})

    def begin_replay(self, max_record_bytes: int) -> None:
        """
        Become the one that replays dead letters of the group; one that has begun before cannot write back any more.

        Args:
            max_record_bytes: Of the longest letter.
        """
        name = f"{self._settings.group_id}-replay"
        with self._understood("cannot be written"):
            producer = Producer(properties(self._settings) | producer_properties(name, max_record_bytes))
            producer.init_transactions(_CALL_S)
        self._replay = producer, self._look()

    def write_back(self, session: str) -> None:
        """
        Write to the brokers, in one transaction, what a replay has changed in the directory.

        Args:
            session: Under which it is counted in the ledger.
        Raises:
            StateInUseError: Another replay has begun.
        """
        assert self._replay is not None
        producer, (before, accepted, repeated) = self._replay
        after, accepted_now, repeated_now = self._look()
        gone = [place for place in before if place not in after]
        again = [place for place in after if after[place] != before[place]]
        if not gone and not again:
            return
        first = (gone or again)[0]
        prefix = f"{self._letters[first].key.rpartition('/')[0]}/{session}"
        topic = before[first].path.rpartition("/")[0]
        accepted_now.subtract(accepted)
        repeated_now.subtract(repeated)
        rows = [
            ledger_row(prefix, key, (accepted_now[key], repeated_now[key]))
            for key in accepted_now | repeated_now
            if accepted_now[key] or repeated_now[key]
        ]
        duplicates = repeated_now.total()
        totals = {"accepted": len(gone) - duplicates, "dead_lettered": -len(gone), "duplicates": duplicates}
        rows.append(totals_row(prefix, {"read": 0, **totals, "unreachable": 0}, topic=topic))
        letters = [Document(self._letters[place].key, None) for place in gone]
        letters += [refused_again(after[place], *self._letters[place]) for place in again]
        with self._understood("cannot be written; what was accepted is sent again by the next replay"):
            producer.begin_transaction()
            _write(producer, {self._settings.letters: letters, self._settings.ledger: rows})
            producer.commit_transaction(_CALL_S)


def _write(producer: Producer, documents: Mapping[str, Iterable[Document]]) -> None:
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, _: object) -> None:
        if error is not None and error.code() not in PURGED:
            failed.append(error)

    for topic, each in documents.items():
        produce(producer, topic, each, note)
    if not flushed(producer, _CALL_S) and not failed:
        raise TimeoutError(f"no answer within {_CALL_S:g} s")
    if failed:
        raise KafkaException(failed[0])


def _documents(settings: KafkaSettings, topic: str) -> list[_Kept]:
    """Read a compacted topic to its end: the newest version of each document."""
    _, places = partitions_of(AdminClient(properties(settings)), [topic], _CALL_S)
    how = {
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 10,  # at the end of a partition no more is waited for
    }
    found: dict[str, _Kept] = {}
    with closing(outside_consumer(settings, **how)) as consumer:
        consumer.list_topics(topic, _CALL_S)  # or it looks for the partitions' nodes only half a second later
        consumer.assign([TopicPartition(each.topic, each.partition, OFFSET_BEGINNING) for each in places])
        left = len(places)
        while left:
            message = consumer.poll(_CALL_S)
            if message is None:
                raise TimeoutError(f"no answer within {_CALL_S:g} s")
            error = message.error()
            if error is None:
                key, value = (message.key() or b"").decode(errors="replace"), message.value()
                found.pop(key, None)
                if value is not None:
                    found[key] = _Kept(key, value, cast("Headers", message.headers() or ()))
            elif error.code() == KafkaError._PARTITION_EOF:
                left -= 1
            else:
                raise KafkaException(error)
    return list(found.values())


def _taken_apart(kept: _Kept) -> tuple[float, str, Rejection]:
    """Take a dead letter apart: when it was refused first, of which partition, and what it is."""
    about = {name.removeprefix("shipper."): (value or b"").decode() for name, value in kept.headers if _is_ours(name)}
    offset = int(about["offset"])
    rejection = Rejection(
        start_offset=offset,
        end_offset=offset + 1,
        rule=about["rule"],
        message=about["message"],
        raw=b"" if "tombstone" in about else kept.value,
        event_id=about.get("event_id", ""),
        consumer_id=about.get("consumer_id", ""),
        status=int(about["status"]),
        delivery=about["delivery"],  # type: ignore[arg-type]  # as it was written
        attempts=int(about["attempts"]),
    )
    return float(about["first_at"]), f"{about['topic']}/{about['partition']}", rejection


def _is_ours(name: str) -> bool:
    return name.startswith("shipper.") and name != "shipper.key"


def _counted(rows: Iterable[_Kept], stream_of: Callable[[str, str], Stream]) -> list[Checkpoint]:
    """Make a checkpoint of each partition, with what was counted of it in all sessions."""
    paths: dict[str, str] = {}
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    accepted: dict[str, list[Tally]] = defaultdict(list)
    repeated: dict[str, list[Tally]] = defaultdict(list)
    for each in rows:
        place, _, last = each.key.rsplit("/", 2)  # TOPIC-ID/PARTITION
        if last == "totals":
            row: dict[str, Any] = msgspec.json.decode(each.value)
            paths[place] = f"{row['topic']}/{place.rpartition('/')[2]}"
            totals[place].update({name: row[name] for name in ("accepted", "duplicates")})
            continue
        if last.startswith(PART):
            *fields, counts, repeats = unpacked(each.value)
        else:
            place, _, hour, brand, affiliate, media = each.key.rsplit("/", 5)
            row = msgspec.json.decode(each.value)
            *fields, counts, repeats = [
                [hour],
                [int(brand)],
                [affiliate],
                [media],
                [row["accepted"]],
                [row["duplicates"]],
            ]
        keys = list(zip(*fields, strict=True))
        accepted[place].append(dict(zip(keys, counts, strict=True)))
        repeated[place].append(dict(zip(keys, repeats, strict=True)))
    return [
        _passed(
            stream_of(place, paths[place]),
            each["accepted"],
            each["duplicates"],
            ledger=accepted[place],
            repeated=repeated[place],
        )
        for place, each in totals.items()
    ]


def _passed(
    stream: Stream, accepted: int = 0, duplicates: int = 0, rejections: Sequence[Rejection] = (), **what: Any
) -> Checkpoint:
    return Checkpoint(
        stream=stream,
        end_offset=0,
        tail=b"",
        read=accepted + duplicates + len(rejections),
        accepted=accepted,
        duplicates=duplicates,
        rejections=[*rejections],
        **what,
    )
