"""What a report says, as a hash: the same for two answers that differ only in what each request gets anew."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Final

import msgspec
from msgspec import Raw

_OF_THE_REQUEST: Final = ("id", "reportingTime")
_UNORDERED: Final = ("brands", "marketingSources")  # by level; their items have ids, their order says nothing

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])
_SORTED: Final = msgspec.json.Encoder(order="sorted")


def content_hash(body: bytes) -> str:
    """
    Hash the content of a report, undocumented fields included.

    `id` and `reportingTime` of the report do not count, nor the order of fields, of brands and of marketing sources,
    nor zeros at the end of a figure: 1.5000 is 1.5.

    Args:
        body: A report that could be read.
    Returns:
        64 hexadecimal characters.
    """
    document = _OBJECT.decode(body)
    for name in _OF_THE_REQUEST:
        document.pop(name, None)
    return _digest(document).hex()


def _digest(fields: dict[str, Raw], level: int = 0) -> bytes:
    """Digest an object; of the long lists in it, one item at a time is taken apart."""
    content = sha256()
    for depth, name in enumerate(_UNORDERED):
        listed = _LIST.decode(fields.pop(name)) if depth == level and name in fields else []
        items = [_digest(_OBJECT.decode(item), level + 1) for item in listed]
        content.update(len(items).to_bytes(8))
        content.update(b"".join(sorted(items)))
    plain = json.loads(msgspec.json.encode(fields), parse_int=_number, parse_float=_number)
    content.update(_SORTED.encode(plain))
    return content.digest()


def _number(text: str) -> Raw:
    """Write a number in one way, as text: it may be of any size. With an exponent it is left as it is."""
    if "." in text and "e" not in text.lower():
        text = text.rstrip("0").rstrip(".")
    return Raw(b"0" if text == "-0" else text.encode())
