"""The network checks of `shipper check`, made through the connection used for delivery."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Result = Literal["ok", "note", "fail"]  # `note`: not wrong, but worth knowing


class Item(Struct, frozen=True):
    result: Result
    name: str  # a setting, such as `intake.token`, or a step of a connection, such as `intake:tls`
    what: str  # for humans; never contains a secret
