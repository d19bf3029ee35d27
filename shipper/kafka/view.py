"""Copies a group's state from the brokers into a state directory, for commands that read one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka import KafkaException, Producer

from shipper.config.settings import KafkaSettings
from shipper.kafka.client import (
    PURGED,
    ConnectionErrors,
    KafkaError,
    admin_client,
    client_properties,
    error_of,
    flush,
    producer_properties,
    translate_errors,
)
from shipper.kafka.documents import (
    Document,
    Row,
    is_owner,
    ledger_affiliate,
    ledger_row,
    owner_of,
    parse_row,
    produce,
    read_table,
    totals_row,
    updated_letter,
)
from shipper.kafka.stream import Headers, has_record, without_prefix
from shipper.model.records import Checkpoint, LedgerKey, Rejection, Stream, Tally
from shipper.state.ledger import read_counts
from shipper.state.letters import EVERYTHING, DeadLetter, open_letters
from shipper.state.store import Store

_CALL_S: Final = 15.0
_TRANSACTION_S: Final = 60.0  # for millions of letters; the next replay or purge ends one that hangs
_KEY: Final = "shipper.key"

LetterKey = tuple[int, int]  # stream and offset
Streams = Callable[[str, str], Stream]


class KeyAndHeaders(NamedTuple):
    """The key of a message, or None, and its headers."""

    key: bytes | None
    headers: Headers


class _Contents(NamedTuple):
    """The contents of the directory."""

    letters: dict[LetterKey, DeadLetter]
    accepted: Counter[LedgerKey]
    duplicates: Counter[LedgerKey]


class GroupView:
    """
    The committed dead letters and ledger of a group, as of now.

    Only one process can change the letters of a group. The next one first ends its transaction, and then sees what it
    has written; so no letter returns that was deleted meanwhile.

    Args:
        directory: Where to copy them; an empty directory for the caller's exclusive use.
        max_record_bytes: Size of the longest record, to become the process that can change letters; None = only read.

    Attributes:
        skipped: Number of messages by topic and by the other group that wrote them, or "" if shipper did not.
    Raises:
        SourceError: In every method: the brokers refuse or do not answer.
        StateInUseError: In methods that write: another process has become the one that can.
    """

    def __init__(self, settings: KafkaSettings, directory: Path, *, max_record_bytes: int | None = None) -> None:
        self._settings = settings
        self._directory = directory
        self._subject = f"dead letters and ledger of group {settings.group_id}"
        self._letters: dict[LetterKey, Document] = {}
        self.skipped: Counter[tuple[str, str]] = Counter()
        self._producer: Producer | None = None
        self._fatal: KafkaError | None = None
        self._connection_errors = ConnectionErrors()
        if settings.security == "tls" or settings.sasl_mechanism:  # other calls wait for their limit if it is refused
            with translate_errors(settings, f"{self._subject} cannot be read"), admin_client(settings, _CALL_S):
                pass
        if max_record_bytes is not None:
            name = f"{settings.group_id}-replay"
            transactional = producer_properties(name, max_record_bytes, limit_s=_TRANSACTION_S)
            with translate_errors(settings, f"{self._subject} cannot be written"):
                self._producer = Producer(client_properties(settings, on_error=self._note_error) | transactional)
                with self._connection_errors.explaining(settings, self._producer.poll):
                    self._producer.init_transactions(_CALL_S)
        right = f"READ on the topics {settings.letters} and {settings.ledger}"
        with translate_errors(settings, f"{self._subject} cannot be read", right):
            letters = read_table(settings, settings.letters, is_complete=max_record_bytes is not None)
            rows = read_table(settings, settings.ledger)
        self._copy(letters, rows)

    def _copy(self, letters: Iterable[Document], rows: Iterable[Document]) -> None:
        streams: dict[str, Stream] = {}

        def stream_of(partition: str, path: str) -> Stream:  # not by path, as a topic may be recreated under its name
            return streams.setdefault(partition, Stream(stream_id=len(streams) + 1, kind="kafka", path=path))

        own = []
        for letter in letters:
            owner = owner_of(letter.headers)
            if is_owner(owner, self._settings.group_id):
                own.append(letter)
            else:
                self.skipped[self._settings.letters, owner or ""] += 1
        # By time and place, as the brokers return them in no order, so that their ids ascend like those of others.
        parsed = [(*_parse_letter(letter), letter) for letter in own]
        parsed.sort(key=lambda item: (item[0], item[1], item[2].start_offset))
        with closing(Store(self._directory)) as store:
            for first_at, group in groupby(parsed, key=itemgetter(0)):
                rejections: dict[str, tuple[Stream, list[Rejection]]] = {}
                for _, path, rejection, letter in group:
                    partition = letter.key.rpartition("/")[0]
                    stream = stream_of(partition, path)
                    rejections.setdefault(partition, (stream, []))[1].append(rejection)
                    self._letters[stream.stream_id, rejection.start_offset] = letter
                checkpoints = [
                    Checkpoint(stream=stream, end_offset=0, read=len(rejected), rejections=rejected)
                    for stream, rejected in rejections.values()
                ]
                store.save(checkpoints, first_at)
            store.save(_count_checkpoints(self._own_rows(rows), stream_of), 0.0)

    def _own_rows(self, documents: Iterable[Document]) -> list[Row]:
        rows = []
        for document in documents:
            if (row := parse_row(document)) is None:
                self.skipped[self._settings.ledger, ""] += 1
            else:
                rows.append(row)
        groups = {row.session: row.totals.group for row in rows if row.totals is not None}
        others = {name: group for name, group in groups.items() if not is_owner(group, self._settings.group_id)}
        self.skipped.update((self._settings.ledger, others[row.session]) for row in rows if row.session in others)
        return [row for row in rows if row.session not in others]

    def _contents(self) -> _Contents:
        with closing(open_letters(self._directory)) as letters:
            newest = letters.newest(EVERYTHING, len(self._letters) or 1)
        contents = _Contents(
            {(letter.stream_id, letter.start_offset): letter for letter in newest}, Counter(), Counter()
        )
        for row in read_counts(self._directory):
            key = row.hour, row.brand_id, ledger_affiliate(row.affiliate_id), row.media
            contents.accepted[key] += row.accepted
            contents.duplicates[key] += row.duplicates
        return contents

    def message_of(self, letter: DeadLetter) -> KeyAndHeaders:
        """Return the key and the headers of the message of a dead letter, as they are stored with it."""
        headers = self._letters[letter.stream_id, letter.start_offset].headers
        key = next((value for name, value in headers if name == _KEY), None)
        return KeyAndHeaders(key, [header for header in headers if not header[0].startswith("shipper.")])

    def delete(self, letters: Iterable[DeadLetter]) -> None:
        """Delete dead letters; their bytes remain until the brokers compact the topic."""
        deleted = [self._letters[letter.stream_id, letter.start_offset].deletion() for letter in letters]
        with translate_errors(self._settings, f"{self._subject} cannot be written"):
            self._commit({self._settings.letters: deleted})

    def _commit(self, documents: Mapping[str, Iterable[Document]]) -> None:
        """Write documents in one transaction."""
        producer = self._producer
        assert producer is not None
        producer.poll(0)
        if self._fatal is not None:  # the calls would not tell the reason
            raise KafkaException(self._fatal)
        try:
            producer.begin_transaction()
            _write(producer, documents)
            producer.commit_transaction(_CALL_S)
        except KafkaException as exception:  # the error that ended the producer may arrive after the call
            producer.poll(0)
            raise KafkaException(self._fatal or error_of(exception)) from None

    def _note_error(self, error: KafkaError) -> None:
        self._connection_errors(error)
        if error.fatal():
            self._fatal = error

    @contextmanager
    def replaying(self, session: str) -> Iterator[None]:
        """Write what a replay changes in the directory to the brokers at its end, as a session of the ledger."""
        old, settings = self._contents(), self._settings
        yield
        new = self._contents()
        deleted = [key for key in old.letters if key not in new.letters]
        updated = [key for key, letter in new.letters.items() if letter != old.letters[key]]
        if not deleted and not updated:
            return
        first = (deleted or updated)[0]
        prefix = f"{self._letters[first].key.rpartition('/')[0]}/{session}"
        topic = old.letters[first].path.rpartition("/")[0]
        new.accepted.subtract(old.accepted)
        new.duplicates.subtract(old.duplicates)
        rows = [
            ledger_row(prefix, key, (new.accepted[key], new.duplicates[key]))
            for key in new.accepted | new.duplicates
            if new.accepted[key] or new.duplicates[key]
        ]
        duplicates = new.duplicates.total()
        totals = {
            "read": 0,
            "accepted": len(deleted) - duplicates,
            "dead_lettered": -len(deleted),
            "duplicates": duplicates,
        }
        rows.append(totals_row(prefix, totals | {"unreachable": 0}, topic=topic, group=settings.group_id))
        letters = [self._letters[key].deletion() for key in deleted]
        letters += [updated_letter(new.letters[key], self._letters[key]) for key in updated]
        failure = f"{self._subject} cannot be written; accepted records are sent again by the next replay"
        with translate_errors(settings, failure):
            self._commit({settings.letters: letters, settings.ledger: rows})


def _write(producer: Producer, documents: Mapping[str, Iterable[Document]]) -> None:
    failed: list[KafkaError] = []

    def note(error: KafkaError | None, _: object) -> None:
        if error is not None and error.code() not in PURGED:
            failed.append(error)

    for topic, batch in documents.items():
        produce(producer, topic, batch, note)
    if not flush(producer, _CALL_S) and not failed:
        raise TimeoutError(f"no answer within {_CALL_S:g} s")
    if failed:
        raise KafkaException(failed[0])


def _parse_letter(letter: Document) -> tuple[float, str, Rejection]:
    """Return the time of a dead letter's first rejection, the path of its partition, and the rejected record."""
    fields = {
        name.removeprefix("shipper."): (value or b"").decode()
        for name, value in letter.headers
        if name.startswith("shipper.") and name != _KEY
    }
    offset = int(fields["offset"])
    rejection = Rejection(
        start_offset=offset,
        end_offset=offset + 1,
        rule=fields["rule"],
        message=fields["message"],
        raw=without_prefix(value) if "tombstone" not in fields and has_record(value := letter.value or b"") else b"",
        event_id=fields.get("event_id", ""),
        consumer_id=fields.get("consumer_id", ""),
        status=int(fields["status"]),
        delivery=fields["delivery"],  # type: ignore[arg-type]  # as written
        attempts=int(fields["attempts"]),
        whole_bytes=int(fields.get("whole_bytes", 0)),
    )
    return float(fields["first_at"]), f"{fields['topic']}/{fields['partition']}", rejection


def _count_checkpoints(rows: Iterable[Row], stream_of: Streams) -> list[Checkpoint]:
    """Return a checkpoint for each partition with the counts of all its sessions."""
    paths: dict[str, str] = {}
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    accepted: dict[str, list[Tally]] = defaultdict(list)
    repeated: dict[str, list[Tally]] = defaultdict(list)
    for _, partition, session, columns in rows:
        if session is not None:
            paths[partition] = f"{session.topic}/{partition.rpartition('/')[2]}"
            totals[partition].update(accepted=session.accepted, duplicates=session.duplicates)
            continue
        *fields, counts, repeats = columns
        keys = list(zip(*fields, strict=True))
        accepted[partition].append(dict(zip(keys, counts, strict=True)))
        repeated[partition].append(dict(zip(keys, repeats, strict=True)))
    return [
        Checkpoint(
            stream=stream_of(partition, paths[partition]),
            end_offset=0,
            read=sums.total(),
            accepted=sums["accepted"],
            duplicates=sums["duplicates"],
            ledger=accepted[partition],
            repeated=repeated[partition],
        )
        for partition, sums in totals.items()
    ]
