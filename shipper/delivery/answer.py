"""Data types of an answer, and of what it says about the events that were sent."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Answer(Struct, frozen=True):
    """
    What came back for one request.

    Attributes:
        status: The HTTP status code.
        content_type: Lower case, without parameters; empty if there was none.
        retry_after, date: The headers as they came; empty if there were none.
        body: At most the bytes asked for; the rest was not read.
        request_id: By which the service's people find the request again; empty if it named none.
    """

    status: int
    content_type: str
    retry_after: str
    body: bytes
    date: str = ""
    request_id: str = ""


class Results(Struct, frozen=True):
    """
    Attributes:
        rejected: By the index of the event in the batch: what the service says.
        retried: Indexes of events that the service could not take for now.
        unnamed: How many more it refused, at least, without saying which.
        is_again: Some of those that it does not name, it could not take for now.
        denial: The field that says that all failed; empty if none does.
        status: The number that goes with it, as of HTTP; 0 if there is none.
        unclear: What was not understood, for a person, without any value of the answer.
        is_told: It says of single events, or by counts, what became of them.
    """

    rejected: dict[int, str] = {}
    retried: frozenset[int] = frozenset()
    unnamed: int = 0
    is_again: bool = False
    denial: str = ""
    status: int = 0
    unclear: str = ""
    is_told: bool = False


ALL_TAKEN: Final = Results()
