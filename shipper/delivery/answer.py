"""Data types of an answer and of its results for the events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, Self
from urllib.parse import urlsplit

from msgspec import Struct

from shipper.system.addresses import host_of

_ENCODINGS: Final = {"gzip": "gzip", "x-gzip": "gzip", "br": "br", "deflate": "deflate", "zstd": "zstd"}
_GZIP: Final = b"\x1f\x8b"
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
    encoding: str = ""  # how the body is compressed, according to its header: a name of a known method
    redirects_to: str = ""  # the host of another address, which may be the same host

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
            encoding=_ENCODINGS.get(texts.get(b"content-encoding", "").strip().lower(), ""),
            redirects_to=_host_of(texts.get(b"location", "")),
        )

    @property
    def compression(self) -> str:
        """How the body is compressed, which no request asks for; empty if it is not."""
        return "gzip" if self.body.startswith(_GZIP) else self.encoding if self.body else ""


def _host_of(address: str) -> str:
    """Return the host of an address; nothing else of it, as it may contain secrets or values of records."""
    with suppress(ValueError):
        return host_of(urlsplit(address).hostname or "") or ""
    return ""


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
