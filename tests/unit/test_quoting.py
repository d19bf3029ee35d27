"""Quotations from the service: only plain words, no secrets and no personal data."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode

import pytest

from shipper.delivery.credentials import Authorization
from shipper.delivery.quoting import quotation
from tests.cases import each

PERSON = urlsafe_b64encode(json.dumps({"sub": "Ariadne", "name": "Ariadne Kowalski", "iss": "login"}).encode()).decode()
AUTHORIZATION = Authorization(f"eyJhbGciOiJIUzI1NiJ9.{PERSON.rstrip('=')}.c2lnbmF0dXJl", "hushhush")
BODY = json.dumps(
    {
        "EventType": "Acquisition",
        "events": [
            {"Username": "Otter", "ConsumerID": 4711, "AffiliateID": "Acme", "IP": "192.0.2.7", "BrandID": 17},
            {"Username": "Zo\N{LATIN SMALL LETTER E WITH DIAERESIS}", "FirstName": {"is": ["Anna"]}},
            {"Username": "Big Fish", "ConsumerID": 12, "AffiliateID": ""},
        ],
    }
).encode()


@each(
    ("said", "quoted"),
    [
        ("The subscription is suspended.", "The subscription is suspended."),
        ("Access denied: the unit isn't paid (code 17)", "Access denied: the unit isn't paid (code 17)"),
        ("Zugriff verweigert, bitte später", "Zugriff verweigert, bitte später"),
        ("IP 192.0.2.7 is not allowed", "IP *** is not allowed"),
        ("address 2001:db8::7 is blocked", "address *** is blocked"),
        ("user anna.b@example.com has no rights", "user *** has no rights"),
        ("no rights for brisk_otter17", "no rights for ***"),
        ("no rights for otter, and none for big fish", "no rights for ***, and none for ***"),
        ("consumer 4711 of Acme is closed", "consumer *** of *** is closed"),
        ("consumer 48151623 is closed", "consumer *** is closed"),
        ("otter's account, that of 'Otter' and of OTTER", "*** account, that of *** and of ***"),
        ("BIG is unknown, as are 47 11 and 192 . 0 . 2 . 7", "*** is unknown, as are *** and ***"),
        ("Zoe\N{COMBINING DIAERESIS} and Anna are unknown", "*** and *** are unknown"),
        ("key hushhush is refused", "key *** is refused"),
        ("key hush... is refused", "key *** is refused"),
        ("Bearer short is refused", "Bearer *** is refused"),
        ("token eyJhbGciOiJIUzI... is refused", "token *** is refused"),
        ("the token of Ariadne Kowalski expired", "the token of *** expired"),
        ("insufficient_scope", "insufficient_scope"),
        ('say "no"; or yes', "say 'no', or yes"),
        ("two\nlines\tand more", "two lines and more"),
        ("\x1b[2J turned \u202eround", "*** turned ***"),
        ('{"reason":"no"}', ""),
        ("4711 0815", ""),
        ("", ""),
        ("<html><head><title>Access Denied</title></head><body>secret</body></html>", "Access Denied"),
        ("<html>nothing", ""),
    ],
)
def test_plain_words_are_quoted_and_everything_else_is_masked(said: str, quoted: str):
    assert quotation(said, AUTHORIZATION, BODY) == quoted


def test_a_quotation_is_short():
    long = quotation("word " * 100_000, AUTHORIZATION)
    assert len(long) <= 162
    assert long.endswith(" word …")


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"events":[1]}', b"[" * 100_000])
def test_nothing_is_quoted_if_the_records_are_unknown(body: bytes):
    assert quotation("no", AUTHORIZATION, body) == ""


def test_a_token_of_any_form_is_accepted():
    for token in ("", "x", "a.b.c", "a.bm8.c", "a.W10.c", "." * 1000):
        assert quotation("no", Authorization(token, "key")) == "no"
