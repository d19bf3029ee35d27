"""
Full names of currencies and their ISO 4217 codes, where the two certainly belong together.

A report gives a currency by its name. The names here are those of Unicode's CLDR in English, then of ISO 4217, then
irregular plurals and a few that mean nothing else. A name that two currencies of today share is not here.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_NAMES: Final = """
AED United Arab Emirates Dirham; UAE Dirham; Emirati Dirham
AFN Afghan Afghani; Afghani
ALL Albanian Lek; Lek; Albanian Lekë
AMD Armenian Dram
ANG Netherlands Antillean Guilder
AOA Angolan Kwanza; Kwanza
ARS Argentine Peso
AUD Australian Dollar
AWG Aruban Florin
AZN Azerbaijani Manat; Azerbaijan Manat
BAM Bosnia-Herzegovina Convertible Mark; Convertible Mark
BBD Barbadian Dollar; Barbados Dollar
BDT Bangladeshi Taka; Taka
BGN Bulgarian Lev; Bulgarian Leva
BHD Bahraini Dinar
BIF Burundian Franc; Burundi Franc
BMD Bermudan Dollar; Bermudian Dollar
BND Brunei Dollar
BOB Bolivian Boliviano; Boliviano
BRL Brazilian Real
BSD Bahamian Dollar
BTN Bhutanese Ngultrum; Ngultrum
BWP Botswanan Pula; Pula
BYN Belarusian Ruble; Belarusian Rouble
BZD Belize Dollar
CAD Canadian Dollar
CDF Congolese Franc
CHF Swiss Franc
CLP Chilean Peso
CNY Chinese Yuan; Yuan Renminbi; Renminbi; Chinese Renminbi; Chinese Yuan Renminbi
COP Colombian Peso
CRC Costa Rican Colón
CUP Cuban Peso
CVE Cape Verdean Escudo; Cabo Verde Escudo
CZK Czech Koruna; Czech Koruny
DJF Djiboutian Franc; Djibouti Franc
DKK Danish Krone; Danish Kroner
DOP Dominican Peso
DZD Algerian Dinar
EGP Egyptian Pound
ERN Eritrean Nakfa; Nakfa
ETB Ethiopian Birr
EUR Euro
FJD Fijian Dollar; Fiji Dollar
FKP Falkland Islands Pound
GBP British Pound; Pound Sterling; Sterling; Pounds Sterling; British Pound Sterling; Great British Pound; UK Pound
GEL Georgian Lari; Lari
GHS Ghanaian Cedi; Ghana Cedi
GIP Gibraltar Pound
GMD Gambian Dalasi; Dalasi
GNF Guinean Franc
GTQ Guatemalan Quetzal; Quetzal
GYD Guyanaese Dollar; Guyana Dollar
HKD Hong Kong Dollar
HNL Honduran Lempira; Lempira
HRK Croatian Kuna; Kuna
HTG Haitian Gourde; Gourde
HUF Hungarian Forint; Forint
IDR Indonesian Rupiah; Rupiah
ILS Israeli New Shekel; New Israeli Sheqel; New Israeli Shekel
INR Indian Rupee
IQD Iraqi Dinar
IRR Iranian Rial
ISK Icelandic Króna; Iceland Krona; Icelandic Krónur
JMD Jamaican Dollar
JOD Jordanian Dinar
JPY Japanese Yen; Yen
KES Kenyan Shilling
KGS Kyrgystani Som; Kyrgyz Som
KHR Cambodian Riel; Riel
KMF Comorian Franc
KPW North Korean Won
KRW South Korean Won; Won
KWD Kuwaiti Dinar
KYD Cayman Islands Dollar
KZT Kazakhstani Tenge; Tenge
LAK Laotian Kip; Lao Kip
LBP Lebanese Pound
LKR Sri Lankan Rupee; Sri Lanka Rupee
LRD Liberian Dollar
LSL Lesotho Loti; Loti
LYD Libyan Dinar
MAD Moroccan Dirham
MDL Moldovan Leu; Moldovan Lei
MGA Malagasy Ariary; Malagasy Ariaries
MKD Macedonian Denar; Denar; Macedonian Denari
MMK Myanmar Kyat; Kyat
MNT Mongolian Tugrik; Tugrik
MOP Macanese Pataca; Pataca; Macau Pataca
MRU Mauritanian Ouguiya; Ouguiya
MUR Mauritian Rupee; Mauritius Rupee
MVR Maldivian Rufiyaa; Rufiyaa
MWK Malawian Kwacha; Malawi Kwacha
MXN Mexican Peso
MYR Malaysian Ringgit
MZN Mozambican Metical; Mozambique Metical
NAD Namibian Dollar; Namibia Dollar
NGN Nigerian Naira; Naira
NIO Nicaraguan Córdoba; Cordoba Oro
NOK Norwegian Krone; Norwegian Kroner
NPR Nepalese Rupee
NZD New Zealand Dollar
OMR Omani Rial; Rial Omani
PAB Panamanian Balboa; Balboa
PEN Peruvian Sol; Sol; Peruvian Soles
PGK Papua New Guinean Kina; Kina
PHP Philippine Peso
PKR Pakistani Rupee; Pakistan Rupee
PLN Polish Zloty; Zloty; Polish Złoty; Złoty
PYG Paraguayan Guarani; Guarani
QAR Qatari Riyal; Qatari Rial
RON Romanian Leu; Romanian Lei
RSD Serbian Dinar
RUB Russian Ruble; Russian Rouble
RWF Rwandan Franc; Rwanda Franc
SAR Saudi Riyal
SBD Solomon Islands Dollar
SCR Seychellois Rupee; Seychelles Rupee
SDG Sudanese Pound
SEK Swedish Krona; Swedish Kronor
SGD Singapore Dollar
SHP St. Helena Pound; Saint Helena Pound
SLE Sierra Leonean Leone; Leone
SOS Somali Shilling
SRD Surinamese Dollar; Surinam Dollar
SSP South Sudanese Pound
STN São Tomé & Príncipe Dobra; Dobra
SVC Salvadoran Colón; El Salvador Colon; Salvadoran Colones
SYP Syrian Pound
SZL Swazi Lilangeni; Lilangeni; Swazi Emalangeni
THB Thai Baht; Baht
TJS Tajikistani Somoni; Somoni
TMT Turkmenistani Manat; Turkmenistan New Manat
TND Tunisian Dinar
TOP Tongan Pa'anga; Pa'anga
TRY Turkish Lira; New Turkish Lira
TTD Trinidad & Tobago Dollar
TWD New Taiwan Dollar; Taiwan New Dollar
TZS Tanzanian Shilling
UAH Ukrainian Hryvnia; Hryvnia
UGX Ugandan Shilling; Uganda Shilling
USD US Dollar; United States Dollar; American Dollar
UYU Uruguayan Peso; Peso Uruguayo
UZS Uzbekistani Som; Uzbekistan Sum
VES Venezuelan Bolívar
VND Vietnamese Dong; Dong
VUV Vanuatu Vatu; Vatu
WST Samoan Tala; Tala
XAF Central African CFA Franc; CFA Franc BEAC
XCD East Caribbean Dollar
XCG Caribbean Guilder
XOF West African CFA Franc; CFA Franc BCEAO
XPF CFP Franc
YER Yemeni Rial
ZAR South African Rand; Rand
ZMW Zambian Kwacha
ZWG Zimbabwean Gold; Zimbabwe Gold
"""

_POINTS: Final = ".'\N{RIGHT SINGLE QUOTATION MARK}\N{MODIFIER LETTER TURNED COMMA}"


def _key(name: str) -> str:
    """Leave out what may be written in several ways: case, accents, points, apostrophes, `&`, runs of blanks."""
    spelt = unicodedata.normalize("NFKD", name.replace("&", " and ")).casefold()
    return " ".join("".join(filter(_counts, spelt)).split())


def _counts(character: str) -> bool:
    return not unicodedata.combining(character) and character not in _POINTS


_NAMES_BY_CODE: Final = {line[:3]: line[4:].split("; ") for line in _NAMES.split("\n") if line}
_CODES_BY_KEY: Final = {
    _key(known): code
    for code, names in _NAMES_BY_CODE.items()
    for known in (code, *names, *(f"{name}s" for name in names))
}


def currency_code(name: str | None) -> str | None:
    """
    Find the ISO 4217 code of a currency.

    Args:
        name: Its full name, singular or plural, or its code; upper or lower case.
    Returns:
        Three capital letters; None if the name is not certainly that of one currency.
    """
    return _CODES_BY_KEY.get(_key(name or ""))


def is_same_currency(one: str | None, other: str) -> bool:
    """Return whether two names are certainly those of one currency."""
    if one is None:
        return False
    return one.casefold() == other.casefold() or currency_code(one) == (currency_code(other) or "")
