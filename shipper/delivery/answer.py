"""Data types of an answer and of its results for the events."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Answer(Struct, frozen=True):
    """An answer to a request; missing headers are empty."""

    status: int
    content_type: str  # lower case, without parameters
    retry_after: str
    body: bytes  # truncated at the requested maximum
    date: str = ""
    request_id: str = ""  # for the operators of the service


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
