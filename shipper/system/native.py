"""The native part of shipper, which is optional: `native/` in the repository, installed as `shipper_native`."""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

from shipper.model.version import __version__


def _loaded() -> Any:
    if os.environ.get("SHIPPER_NATIVE") == "0":
        return None
    try:
        module = importlib.import_module("shipper_native")
    except ImportError:
        return None
    return module if module.__version__ == __version__ else None


NATIVE: Final = _loaded()
"""The module; None if it is switched off, not installed, or of another version."""
ENGINE: Final = "pure" if NATIVE is None else "native"
