"""The optional native extension: `native/` in the repository, installed as `shipper_native`."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

_INTERFACE: Final = 4  # as in native/src/lib.rs


def _load() -> Any:
    if os.environ.get("SHIPPER_NATIVE") == "0":
        return None
    try:
        module = importlib.import_module("shipper_native")
    except ImportError:
        return None
    return module if getattr(module, "INTERFACE", 1) == _INTERFACE else None


NATIVE: Final = _load()
"""The module; None if it is disabled, not installed, or built for another version of this package."""
ENGINE: Final = "pure" if NATIVE is None else "native"
