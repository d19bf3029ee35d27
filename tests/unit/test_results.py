"""What answers say of single events, in the shapes that such services use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.delivery.answer import Results
from shipper.delivery.answer_reading import read_results
from tests.cases import each

IDS = [f"0f8fad5b-d9cb-469f-a165-70867728950{digit}" for digit in range(5)]


def read(document: Any) -> Results:
    return read_results(document, len(IDS), lambda: IDS)


@each(
    "document",
    [
        {"rejected": [{"index": 3, "EventId": IDS[3], "field": "IP", "message": "bad"}]},
        {"rejected": [{"index": 3, "message": "IP: bad"}]},
        {"Rejected": [{"EventId": IDS[3].upper(), "error": "IP: bad"}]},
        {"errors": [{"row": 4, "EventId": IDS[3], "reason": "IP: bad"}]},
        {"errors": {"3": "IP: bad"}},
        {"errors": {IDS[3]: "IP: bad"}},
        {IDS[3]: "IP: bad"},
        {"failed_records": [{"index": 0, "insert_id": IDS[3], "message": "IP: bad"}]},
        {"accepted": 4, "failed": [{"eventId": IDS[3], "description": "IP: bad"}]},
        {"data": {"outcome": {"rejected": [{"eventId": IDS[3], "description": "IP: bad"}]}}},
        {"results": [{"index": 3, "status": 422, "message": "IP: bad"}]},
        [{"index": 3, "status": "400", "message": "IP: bad"}],
        [{"index": 3, "error": "IP: bad"}],
        [*[{"status": "ok"}] * 3, {"status": "rejected", "error": "IP: bad"}, {"status": "ok"}],
    ],
)
def test_the_refused_event_is_found_with_what_is_said_of_it(document: Any):
    found = read(document)
    assert found.rejected == {3: "IP: bad"}
    assert (found.retried, found.unnamed, found.unclear) == (frozenset(), 0, "")


@pytest.mark.parametrize(
    ("document", "rejected"),
    [
        ({"rejected": [3, 1]}, {3: "", 1: ""}),
        ({"rejected": [IDS[2], IDS[4]]}, {2: "", 4: ""}),
        ({"errors": {"events[3].IP": ["bad", "worse"], "$.events[1]": ["no"]}}, {3: '["bad","worse"]', 1: '["no"]'}),
        ({"rejected": [{"index": 3, "EventId": IDS[2]}]}, {2: f'{{"index":3,"EventId":"{IDS[2]}"}}'}),
    ],
)
def test_shapes_with_less_in_them_are_read(document: Any, rejected: dict[int, str]):
    assert read(document).rejected == rejected


@each(
    ("document", "unnamed"),
    [
        ({"accepted": 2, "rejected": 3}, 3),
        ({"rejected": 1, "errors": [{"index": 3, "message": "bad"}]}, 0),
        ({"rejectedCount": 2, "errors": [{"index": 3, "message": "bad"}]}, 1),
        ({"errors": ["something is wrong"]}, 1),
        ({"errors": "something is wrong"}, 1),
        ({"rejected": [{"EventId": "of-nobody"}]}, 1),
        ({"rejected": [{"index": 5}]}, 1),
        ({"rejected": [-1]}, 1),
        ({"results": [{"status": "failed"}]}, 1),
    ],
)
def test_refused_events_without_a_name_are_counted(document: Any, unnamed: int):
    assert read(document).unnamed == unnamed


@each("name", ["row", "rowNumber", "line", "position"])
def test_a_place_that_may_be_counted_from_1_is_not_believed_nor_any_other_index_beside_it(name: str):
    assert read({"errors": [{name: 2, "message": "bad"}]}) == read({"errors": [{"message": "bad"}]})
    mixed = read({"errors": [{"index": 1, "message": "bad"}, {name: 2, "message": "bad"}]})
    assert (mixed.rejected, mixed.unnamed) == ({}, 1)
    in_order = read([{name: number, "status": 400 if number == 2 else 200} for number in range(1, 6)])
    assert (in_order.rejected, in_order.unnamed) == ({}, 1), "the order may not be the order of the batch"


def test_an_index_out_of_range_takes_the_belief_in_all_others_away():
    found = read({"rejected": [{"index": 1}, {"index": 5}, {"index": 5, "EventId": IDS[4]}]})
    assert set(found.rejected) == {4}
    assert found.unnamed == 1


@each(
    "document",
    [
        None, "x", [], {}, {"accepted": 5}, {"rejected": 0}, {"rejected": []}, {"rejected": None}, {"errors": {}},
        {"errors": False}, {"failed": ""}, 5, True,
        {"events": [{"EventId": each, "ConsumerStatus": "x"} for each in IDS]},
    ],
)  # fmt: skip
def test_a_document_that_refuses_nothing_says_nothing(document: Any):
    found = read(document)
    assert (found.rejected, found.retried, found.unnamed, found.denial, found.unclear) == ({}, frozenset(), 0, "", "")


@each("again", [503, 503.0, "503", "429", "425", 408, 599, "503 Service Unavailable", "throttled"])
@each("refused", [400, "422", 409.0, "denied", "fail", False, "false", "Rejected", "INVALID_ARGUMENT"])
def test_an_event_that_is_to_be_sent_again_is_no_refused_one(again: Any, refused: Any):
    found = read([{"index": 1, "status": again}, {"index": 3, "status": refused, "error": "bad"}])
    assert (found.rejected, found.retried) == ({3: "bad"}, {1})


def test_results_that_are_all_good_are_told():
    assert read({"results": [{"status": 201}] * 5}).is_told
    assert not read({"id": "x"}).is_told


def test_an_unknown_word_is_neither_refusal_nor_acceptance():
    found = read([{"EventId": each, "status": "zork"} for each in IDS])
    assert not found.rejected
    assert found.unclear


documents = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 600) | st.sampled_from([*IDS, "x", "3"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rejected", "errors", "results", "index", "EventId", "status", "message", "success", "3"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(documents)
def test_whatever_comes_only_events_of_the_batch_are_named(document: Any):
    found = read(msgspec.json.decode(msgspec.json.encode(document)))
    assert set(found.rejected) | found.retried <= set(range(len(IDS)))
    assert found.unnamed >= 0
