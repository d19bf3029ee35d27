"""Row `validate`: the command, whole process; `python -m tests.bench.validate_row FILE`."""

from __future__ import annotations

import json
import subprocess
import sys
import time

from .rows import SHIPPER


def main() -> None:
    """Run it and print what it found as the table wants it."""
    begin = time.perf_counter()
    done = subprocess.run([SHIPPER, "validate", sys.argv[1], "--format", "json"], stdout=subprocess.PIPE, check=True)
    seconds = time.perf_counter() - begin
    print(json.dumps({"accepted": json.loads(done.stdout)["good"], "seconds": seconds}))


if __name__ == "__main__":
    main()
