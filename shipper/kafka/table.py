"""The newest documents of a topic, in a file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from shipper.kafka.documents import Document
from shipper.state.sqlite import fetch, translate_errors

_BATCH: Final = 100
_DATA: Final = msgspec.msgpack.Decoder(tuple[bytes, list[tuple[str, bytes | None]], int])


class DocumentTable:
    """
    The newest document of each key, if not deleted; in a file, because there may be millions.

    Args:
        path: A new file.
        documents: All versions, in their order.
        place: Returns a text by which the table is sorted.
    Raises:
        StateError: In every method: the file cannot be written or read. Errors of `documents` pass through.
    """

    def __init__(self, path: Path, documents: Iterable[Document], place: Callable[[Document], str]) -> None:
        self._path = path
        with translate_errors(path):
            self._db = sqlite3.connect(path, isolation_level=None)
        self._execute("PRAGMA journal_mode = OFF")
        self._execute("CREATE TABLE documents (key TEXT PRIMARY KEY, place TEXT, data BLOB)")
        self._execute("BEGIN")
        rows = ((document.key, *_encode(document, place)) for document in documents)
        while batch := [*islice(rows, _BATCH)]:
            with translate_errors(path):
                self._db.executemany("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", batch)
        self._execute("DELETE FROM documents WHERE data IS NULL")
        self._execute("CREATE INDEX places ON documents (place)")
        self._execute("COMMIT")

    def _execute(self, statement: str) -> None:
        fetch(self._db, self._path, statement)

    def __iter__(self) -> Iterator[tuple[int, Document]]:
        """Yield the documents, sorted, and the number of each for `get`."""
        with translate_errors(self._path):
            for number, key, data in self._db.execute("SELECT rowid, key, data FROM documents ORDER BY place, rowid"):
                yield number, _decode(key, data)

    def get(self, number: int) -> Document:
        """Return a document by its number."""
        ((key, data),) = fetch(self._db, self._path, "SELECT key, data FROM documents WHERE rowid = ?", (number,))
        return _decode(key, data)


def _encode(document: Document, place: Callable[[Document], str]) -> tuple[str, bytes] | tuple[None, None]:
    _, value, headers, partition = document
    if value is None:
        return None, None
    return place(document), msgspec.msgpack.encode((value, headers, partition))


def _decode(key: str, data: bytes) -> Document:
    return Document(key, *_DATA.decode(data))
