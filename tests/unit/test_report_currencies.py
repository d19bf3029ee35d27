"""Currencies by their names: certain ones have a code, no other has."""

from __future__ import annotations

import pytest

from shipper.model.errors import ReportError
from shipper.report import currencies
from shipper.report.currencies import currency_code, currency_name
from tests.cases import each


@each(
    ("name", "code"),
    [
        ("Euro", "EUR"),
        ("euros", "EUR"),
        ("  EURO ", "EUR"),
        ("eur", "EUR"),
        ("US Dollar", "USD"),
        ("U.S. dollars", "USD"),
        ("United States Dollar", "USD"),
        ("British Pound", "GBP"),
        ("British Pounds", "GBP"),
        ("Pound Sterling", "GBP"),
        ("Pounds Sterling", "GBP"),
        ("Great British Pound", "GBP"),
        ("Yen", "JPY"),
        ("Japanese  Yen", "JPY"),
        ("Rand", "ZAR"),
        ("South African Rand", "ZAR"),
        ("Swedish kronor", "SEK"),
        ("Danish Kroner", "DKK"),
        ("Norwegian Krone", "NOK"),
        ("Icelandic Króna", "ISK"),
        ("Icelandic Krona", "ISK"),
        ("Polish Zloty", "PLN"),
        ("Polish Złoty", "PLN"),
        ("Romanian Lei", "RON"),
        ("São Tomé & Príncipe Dobra", "STN"),
        ("Sao Tome and Principe Dobra", "STN"),
        ("Tongan Pa\N{MODIFIER LETTER TURNED COMMA}anga", "TOP"),
        ("Pa\N{RIGHT SINGLE QUOTATION MARK}anga", "TOP"),
        ("Bulgarian Lev", "BGN"),
    ],
)
def test_name_has_its_code(name, code):
    assert currency_code(name) == code


@each(
    "name",
    [
        *(None, "", "s", "$", "XYZ", "US", "Euro Dollar", "Monopoly Money"),
        *("Dollar", "Dollars", "Pound", "Krona", "Crown", "Peso", "Franc", "Som", "Bolívar Soberano"),
        *("tops", "cups", "alls"),  # plurals of codes
    ],
)
def test_what_is_not_certain_has_no_code(name):
    assert currency_code(name) is None


def test_no_name_belongs_to_two_currencies():
    spellings = [
        (currencies._key(spelling), code)
        for code, names in currencies._NAMES_BY_CODE.items()
        for name in (code, *names)
        for spelling in {name, f"{name}s" if name != code else name}
    ]
    assert len(spellings) > 400
    assert len(dict(spellings)) == len(set(spellings))


@each("code", list(currencies._NAMES_BY_CODE))
def test_usual_name_leads_back_to_the_code(code):
    name = currency_name(code)
    assert name
    assert currency_code(name) == currency_code(code) == code


def test_code_that_is_not_known_has_no_name():
    assert currency_name("XYZ") is None
    assert currency_name("gbp") == "British Pound"


def test_aliases_of_the_user_go_first():
    aliases = {"House Chips": "EUR", "Euro": "XEU"}
    assert currency_code("house  chips", aliases) == "EUR"
    assert currency_code("EURO", aliases) == "XEU"
    assert currency_code("Yen", aliases) == "JPY"


@pytest.mark.parametrize("code", ["", "eur", "EURO", "€"])
def test_alias_of_what_is_no_code_is_refused(code):
    with pytest.raises(ReportError, match=r"'Chips' stands for .*three letters"):
        currency_code("Euro", {"Chips": code})
