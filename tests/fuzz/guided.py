"""
`python -m tests.fuzz.guided TARGET [options of libFuzzer]`: a target under a coverage-guided fuzzer.

That is the package atheris, which is not among the dependencies: `pip install atheris` first. It finds what needs
several right bytes in a row in code that is written in Python; an execution costs several times as much, and it sees
nothing of what the decoders in C do.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("atheris is not installed: pip install atheris")

with atheris.instrument_imports(include=["shipper"]):
    from tests.fuzz.engine import quiet
    from tests.fuzz.targets import TARGETS


def main() -> None:
    """Run until it is stopped, or until something does not hold."""
    target = TARGETS[sys.argv.pop(1)]
    folder = Path(tempfile.mkdtemp(prefix=f"shipper-fuzz-{target.name}-"))
    for number, seed in enumerate(target.seeds):
        (folder / str(number)).write_bytes(seed)

    def check(data: bytes) -> None:
        target.check(data)

    with quiet():
        atheris.Setup([*sys.argv, str(folder)], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
