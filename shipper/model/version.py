"""The version of this package, and the command that installs an optional dependency."""

import shlex
import sys
from pathlib import Path
from typing import Final

__version__: Final = "0.1.0"


def install_command(package: str) -> str:
    """Return the command that adds a package to this installation."""
    if "pipx" in Path(sys.prefix).parts:
        return f"pipx inject acquisition-shipper {package}"
    return f"{shlex.quote(sys.executable)} -m pip install {package}"
