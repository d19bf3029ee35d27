"""
Check that nothing grows in a long run: `python -m tests.soak --minutes 30`, or `make soak`.

`shipper run` follows files that are written at its own speed and rotated, and `producer | shipper pipe` runs beside it.
The service fails some requests, and all of them for some seconds of each minute. Both processes are sampled once per
second from outside: memory, descriptors, threads, the state on disk, the log, `/metrics`.

    flatness.py  the curves, and the definition of a flat one
    writing.py   endless events, written to files and to a pipe
    service.py   the service: counts the events, and fails on purpose
    life.py      the whole run, from the start to the final check

Separate commands with other checks:

    held.py      memory and repeated deliveries with the most awkward records: `make held`
    lives.py     followed files against a model, an outage, expiring tokens: `make lives`

Linux only, as it reads /proc.
"""
