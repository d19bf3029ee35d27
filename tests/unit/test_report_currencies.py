"""Currencies by name: only unambiguous names have a code."""

from __future__ import annotations

from shipper.report import currencies
from shipper.report.currencies import currency_code
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
def test_uncertain_name_has_no_code(name):
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
