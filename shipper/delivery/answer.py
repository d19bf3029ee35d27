"""Data types of an answer and of its results for the events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

from msgspec import Struct

_REQUEST_IDS: Final = (b"x-ms-request-id", b"x-request-id", b"request-id")
_REQUEST_ID: Final = re.compile(r"[0-9A-Fa-f-]{16,128}")  # nothing else, as it is logged and could quote a record


class Answer(Struct, frozen=True):
    """An answer to a request; missing headers are empty."""

    status: int
    content_type: str  # lower case, without parameters
    retry_after: str
    body: bytes  # truncated at the requested maximum
    date: str = ""
    request_id: str = ""  # for the operators of the service

    @classmethod
    def of(cls, status: int, headers: Mapping[bytes, bytes], body: bytes) -> Self:
        """Return the answer with these headers, whose names are in lower case."""
        texts = {name: value.decode("latin-1") for name, value in headers.items()}
        request_id = next((texts[name] for name in _REQUEST_IDS if name in texts), "")
        return cls(
            status=status,
            content_type=texts.get(b"content-type", "").partition(";")[0].strip().lower(),
            retry_after=texts.get(b"retry-after", ""),
            body=body,
            date=texts.get(b"date", ""),
            request_id=request_id if _REQUEST_ID.fullmatch(request_id) else "",
        )


class Results(Struct, frozen=True):
    """The results of the sent events, according to an answer."""

    rejected: dict[int, str] = {}  # reasons by index of the event in the batch
    retried: frozenset[int] = frozenset()  # events that the service cannot accept yet
    unnamed: int = 0  # minimum number of other refused events, which the answer does not identify
    has_unnamed_retries: bool = False  # some unidentified events cannot be accepted yet
    failure: str = ""  # the field that reports the failure of the whole batch
    status: int = 0  # the status of that failure, as in HTTP
    unclear: str = ""  # what was not understood, for users; contains no values of the answer
    has_event_results: bool = False  # the answer contains results of single events, or counts


ALL_ACCEPTED: Final = Results()
