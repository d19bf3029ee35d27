"""Copies a group's state from the brokers into a state directory, for commands that read one."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice
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
    is_owner,
    is_totals,
    ledger_affiliate,
    ledger_row,
    owner_of,
    parse_row,
    produce,
    read_documents,
    totals_row,
    updated_letter,
)
from shipper.kafka.stream import Headers, has_record, without_prefix
from shipper.kafka.table import DocumentTable
from shipper.model.records import Checkpoint, LedgerKey, Rejection, Stream
from shipper.state.ledger import read_counts
from shipper.state.letters import EVERYTHING, open_letters
from shipper.state.store import Store

_CALL_S: Final = 15.0
_TRANSACTION_S: Final = 60.0  # for millions of letters; the next replay or purge ends one that hangs
_KEY: Final = "shipper.key"
_COPIED: Final = 32  # checkpoints at once, of a letter each, which may have `input.max_record_bytes`,
_KEYS_COPIED: Final = 200  # or of this many keys of the ledger


class KeyAndHeaders(NamedTuple):
    """The key of a message, or None, and its headers."""

    key: bytes | None
    headers: Headers


class GroupView:
    """
    The committed dead letters and ledger of a group, as of now.

    Only one process can change the letters of a group. The next one first ends its transaction, and then sees what it
    has written; so no letter returns that was deleted meanwhile.

    Args:
        directory: Where to copy them; an empty directory for the caller's exclusive use.
        max_record_bytes: Size of the longest record, to become the process that can change letters; None = only read.
        has_ledger: Also copy the ledger.

    Attributes:
        skipped: Number of messages by topic and by the other group that wrote them, or "" if shipper did not.
    Raises:
        SourceError: In every method: the brokers refuse or do not answer.
        StateInUseError: In methods that write: another process has become the one that can.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        directory: Path,
        *,
        max_record_bytes: int | None = None,
        has_ledger: bool = False,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._subject = f"dead letters and ledger of group {settings.group_id}"
        self._streams: dict[str, Stream] = {}  # by partition, not by path, as a topic may be recreated under its name
        self._numbers = array("q")  # of the letters in the table, in the order of their ids, which begin with 1
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
        self._letters = self._read(settings.letters, self._place_of, is_complete=self._producer is not None)
        with closing(Store(directory)) as store:
            _save(store, self._letter_checkpoints())
            if has_ledger:
                _save(store, self._count_checkpoints(self._read(settings.ledger, _place_of_row)))

    def _read(self, topic: str, place: Callable[[Document], str], *, is_complete: bool = False) -> DocumentTable:
        documents = read_documents(self._settings, topic, is_complete=is_complete)
        with translate_errors(self._settings, f"{self._subject} cannot be read", f"READ on the topic {topic}"):
            return DocumentTable(self._directory / f"{topic}.documents", documents, place)

    def _stream_of(self, partition: str, path: str) -> Stream:
        return self._streams.setdefault(partition, Stream(stream_id=len(self._streams) + 1, kind="kafka", path=path))

    def _is_own(self, letter: Document) -> bool:
        return is_owner(owner_of(letter.headers), self._settings.group_id)

    def _place_of(self, letter: Document) -> str:
        """Order letters by time and position, as the brokers return them in no order, so that their ids ascend."""
        if not self._is_own(letter):
            return ""
        path, rejection = _parse_letter(letter)
        return f"{rejection.first_at:020.6f} {path} {rejection.start_offset:020}"

    def _letter_checkpoints(self) -> Iterator[Checkpoint]:
        for number, letter in self._letters:
            if self._is_own(letter):
                self._numbers.append(number)
                path, rejection = _parse_letter(letter)
                stream = self._stream_of(letter.key.rpartition("/")[0], path)
                yield Checkpoint(stream=stream, end_offset=0, read=1, rejections=[rejection])
            else:
                self.skipped[self._settings.letters, owner_of(letter.headers) or ""] += 1

    def _count_checkpoints(self, documents: DocumentTable) -> Iterator[Checkpoint]:
        groups: dict[str, str] = {}
        checkpoint = None
        size = 0
        for _, document in documents:  # the totals first
            if (row := parse_row(document)) is None:
                self.skipped[self._settings.ledger, ""] += 1
                continue
            session, partition, totals, columns = row
            if totals is not None:
                groups[session] = totals.group
            group = groups.get(session, self._settings.group_id)
            if not is_owner(group, self._settings.group_id):
                self.skipped[self._settings.ledger, group] += 1
            elif totals is not None:
                yield Checkpoint(
                    stream=self._stream_of(partition, f"{totals.topic}/{partition.rpartition('/')[2]}"),
                    end_offset=0,
                    read=totals.accepted + totals.duplicates,
                    accepted=totals.accepted,
                    duplicates=totals.duplicates,
                )
            elif partition in self._streams:
                if checkpoint is None:
                    checkpoint = Checkpoint(stream=self._streams[partition], end_offset=0, ledger=[], repeated=[])
                *fields, accepted, repeated = columns
                keys = [*zip(*fields, strict=True)]
                checkpoint.ledger.append(dict(zip(keys, accepted, strict=True)))
                checkpoint.repeated.append(dict(zip(keys, repeated, strict=True)))
                size += len(keys)
                if size >= _KEYS_COPIED:
                    yield checkpoint
                    checkpoint, size = None, 0
        if checkpoint is not None:
            yield checkpoint

    def _letter(self, letter_id: int) -> Document:
        return self._letters.get(self._numbers[letter_id - 1])

    def message_of(self, letter_id: int) -> KeyAndHeaders:
        """Return the key and the headers of the message of a dead letter, as they are stored with it."""
        headers = self._letter(letter_id).headers
        key = next((value for name, value in headers if name == _KEY), None)
        return KeyAndHeaders(key, [header for header in headers if not header[0].startswith("shipper.")])

    def delete(self, letter_ids: Iterable[int]) -> None:
        """Delete dead letters; their bytes remain until the brokers compact the topic."""
        with translate_errors(self._settings, f"{self._subject} cannot be written"):
            self._commit({self._settings.letters: (self._letter(letter_id).deletion() for letter_id in letter_ids)})

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
        yield
        with closing(open_letters(self._directory)) as letters:
            remaining = letters.ids(EVERYTHING)
            deleted = sorted({*range(1, len(self._numbers) + 1)}.difference(remaining))
            tried = filter(None, map(letters.get, remaining))
            updated = [letter.id for letter in tried if letter.last_at != letter.first_at]
            if not deleted and not updated:
                return
            changed = chain(
                (self._letter(letter_id).deletion() for letter_id in deleted),
                (updated_letter(letter, self._letter(letter.id)) for letter in filter(None, map(letters.get, updated))),
            )
            rows = self._replay_rows(session, deleted, self._letter((deleted or updated)[0]))
            failure = f"{self._subject} cannot be written; accepted records are sent again by the next replay"
            with translate_errors(self._settings, failure):
                self._commit({self._settings.letters: changed, self._settings.ledger: rows})

    def _replay_rows(self, session: str, deleted: Sequence[int], example: Document) -> list[Document]:
        """Return what a replay adds to the ledger, for the partition of one of its letters."""
        accepted, repeated = Counter[LedgerKey](), Counter[LedgerKey]()
        for row in read_counts(self._directory):
            key = row.hour, row.brand_id, ledger_affiliate(row.affiliate_id), row.media
            accepted[key] += row.accepted
            repeated[key] += row.duplicates
        prefix = f"{example.key.rpartition('/')[0]}/{session}"
        duplicates = repeated.total()
        totals = {
            "read": 0,
            "accepted": len(deleted) - duplicates,
            "dead_lettered": -len(deleted),
            "duplicates": duplicates,
            "unreachable": 0,
        }
        topic = _parse_letter(example)[0].rpartition("/")[0]
        return [
            *(ledger_row(prefix, key, (accepted[key], repeated[key])) for key in accepted),
            totals_row(prefix, totals, topic=topic, group=self._settings.group_id),
        ]


def _save(store: Store, checkpoints: Iterator[Checkpoint]) -> None:
    while batch := [*islice(checkpoints, _COPIED)]:
        store.save(batch, 0.0)


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


def _parse_letter(letter: Document) -> tuple[str, Rejection]:
    """Return the path of a dead letter's partition, and the rejected record."""
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
        first_at=float(fields["first_at"]),
    )
    return f"{fields['topic']}/{fields['partition']}", rejection


def _place_of_row(document: Document) -> str:
    """Order the totals of sessions first, because they name the group."""
    return "" if is_totals(document) else "counts"
