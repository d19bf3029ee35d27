"""
How fast is it, and compared with what: `python -m tests.bench --rounds 5 --events 500000`, or `make bench`.

Five rows over the same file of sample events, each row a process of its own, all against the same
server, which throws the events away and counts them:

    floor      ready-made request bodies posted by httpx: what is left when nothing is read or checked
    codec      the codec alone, no network, no state; timed inside the process
    backfill   the whole command `shipper backfill FILE`
    pipe       the whole command line `cat FILE | shipper pipe`
    naive      the script that a competent person writes in forty lines, see `naive.py`

Except for `codec` the rate is that of the whole process, from its start to its end. Rounds are interleaved,
so that a disturbance of the machine meets all rows alike, and the table shows medians. The rows run on one
core and the server on another one. A row whose count is wrong fails; a row that is slow does not.

The sample file is made once by `shipper sample` and kept as `.bench/events-<count>.ndjson`.
"""
