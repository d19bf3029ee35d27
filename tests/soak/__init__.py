"""
Does anything grow that must not: `python -m tests.soak --minutes 30`, or `make soak`.

`shipper run` follows files that are written as fast as it takes them and are rotated, and `producer | shipper pipe`
runs beside it. The service that both send to fails now and then, and in each minute for some seconds altogether. Once a
second both are looked at from outside: memory, descriptors, threads, the state on disk, the log, `/metrics`.

    flatness.py  the curves, and the rule by which one is flat
    looking.py   what can be seen of a process from outside
    writing.py   events without end, into files and into a pipe
    service.py   the service: counts what arrives, and fails
    life.py      all of them together, from the start to the last account
    drawing.py   the curves as SVG
    memory.py    another question: how much memory, by requests in flight and size of batches
    sparse.py    how much memory and how many repeats with the most awkward records: `make held`

`delivery_soak` and `sources_soak` are commands of their own, with other claims. Linux only, as it reads /proc.
"""
