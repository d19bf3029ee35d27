"""What answers say of single events, in the shapes that such services use."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipper.delivery.results import ALL_TAKEN, Results, read_results
from tests.cases import each

IDS = [f"0f8fad5b-d9cb-469f-a165-70867728950{digit}" for digit in range(5)]


def read(document: Any) -> Results:
    return read_results(document, lambda: IDS)


@each(
    "document",
    [
        {"rejected": [{"index": 3, "EventId": IDS[3], "field": "IP", "message": "bad"}]},
        {"rejected": [{"index": 3, "message": "IP: bad"}]},
        {"Rejected": [{"EventId": IDS[3].upper(), "error": "IP: bad"}]},
        {"errors": [{"row": 3, "reason": "IP: bad"}]},
        {"errors": {"3": "IP: bad"}},
        {"errors": {IDS[3]: "IP: bad"}},
        {"failed_records": [{"index": 0, "insert_id": IDS[3], "message": "IP: bad"}]},
        {"accepted": 4, "failed": [{"eventId": IDS[3], "description": "IP: bad"}]},
        {"results": [{"index": 0, "status": 201}, {"index": 3, "status": 422, "message": "IP: bad"}]},
        {
            "results": [
                {"EventId": IDS[0], "status": "accepted"},
                {"EventId": IDS[3], "status": "rejected", "error": "IP: bad"},
            ]
        },
        {"items": [{"id": IDS[3], "success": False, "message": "IP: bad"}, {"id": IDS[1], "success": True}]},
        [{"index": 3, "status": "400", "message": "IP: bad"}, {"index": 1, "status": "200"}],
        [{"index": 3, "error": "IP: bad"}],
    ],
)
def test_the_refused_event_is_found_with_what_is_said_of_it(document: Any):
    assert read(document) == Results(rejected={3: "IP: bad"})


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
    assert read(document) == Results(rejected=rejected)


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


@each(
    "document",
    [
        None, 7, "x", [], {}, {"accepted": 5}, {"rejected": 0}, {"rejected": []}, {"rejected": None}, {"errors": {}},
        {"errors": False}, {"failed": ""}, {"events": [{"EventId": IDS[0], "ConsumerStatus": "Verified"}]}, [1, 2],
    ],
)  # fmt: skip
def test_a_document_that_refuses_nothing_says_nothing(document: Any):
    assert read(document) is ALL_TAKEN


def test_an_event_that_is_to_be_sent_again_is_no_refused_one():
    document = [{"index": 1, "status": 503}, {"index": 2, "status": 429}, {"index": 3, "status": 400, "error": "bad"}]
    assert read(document) == Results(rejected={3: "bad"}, retried=frozenset({1, 2}))


def test_results_that_are_all_good_are_results():
    found = read({"results": [{"index": 0, "status": 201}]})
    assert found == ALL_TAKEN
    assert found is not ALL_TAKEN


def test_an_unknown_word_is_no_refusal():
    assert read([{"index": 0, "status": "queued"}]).rejected == {}


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
