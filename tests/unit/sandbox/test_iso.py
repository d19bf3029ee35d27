"""The code lists of the strict profile."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from shipper.sandbox.iso import COUNTRIES, CURRENCIES, US_STATES
from shipper.sandbox.samples import sample_lines


@pytest.mark.parametrize(("codes", "length"), [(COUNTRIES, 2), (CURRENCIES, 3), (US_STATES, 2)])
def test_codes_are_capital_letters(codes, length):
    assert [code for code in codes if not (len(code) == length and code.isascii() and code.isupper())] == []


def test_lists_are_as_long_as_their_standards():
    assert len(COUNTRIES) == 249
    assert len(US_STATES) == 50 + 1 + 6  # the states, the district, the outlying areas


@pytest.mark.parametrize(
    ("codes", "there", "absent"),
    [
        (COUNTRIES, "AX BQ CW GB IE MT SS SX TL US ZW", "AN CS EU SU TP UK XK XX YU ZR"),
        (CURRENCIES, "CHF EUR GBP SEK SLE USD VED XAF XXX ZAR ZWG", "ABC DEM FRF BTC SLL EEK LTL VEF XXY"),
        (US_STATES, "AK CA CO DC GU HI MI NJ NY PA PR WY", "AA AB ON PW US XX ZZ"),
    ],
)
def test_common_codes_are_listed_and_withdrawn_ones_are_not(codes, there, absent):
    assert set(there.split()) <= codes
    assert not set(absent.split()) & codes


def test_samples_have_codes_of_the_lists():
    events = [json.loads(line) for line in sample_lines(500, end=datetime(2026, 3, 15, tzinfo=UTC))]
    assert {event["ConsumerCountry"] for event in events} <= COUNTRIES
    assert {event["ConsumerCurrencyID"] for event in events} <= CURRENCIES
    assert {event["ConsumerState"] for event in events} - {""} <= US_STATES
