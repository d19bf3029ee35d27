"""
How fast is it, and compared with what: `python -m tests.bench --rounds 5 --events 500000`, or `make bench`.

Each row is a process of its own; those that send do so to the same server, which throws the events away and counts
them. These take records of all profiles of `shipper sample`, `operator` unless the row is called `NAME@PROFILE`, and
run with the native part and (`NAME:pure`) without it:

    codec            the codec alone, no network, no state; timed inside the process
    backfill         the whole command `shipper backfill FILE`
    pipe             the whole command line `cat FILE | shipper pipe`

These take records of an operator, and run with the native part, if it is installed:

    floor            ready-made request bodies posted by httpx: what is left when nothing is read or checked
    backfill-sloppy  `backfill` of records that all need normalising
    backfill-csv     the same of CSV with a mapping
    backfill-many    the same of a folder of files of 500 events each: 1,000 files, if there are 500,000 events
    backfill-gz      the same of one gzip file
    backfill-zst     the same of one zstd file
    backfill-…       the same to a server that is slow, faulty, picky or speaks TLS, and on all cores
    kafka            `backfill kafka://TOPIC` of the same records, in a topic of four partitions; needs `make kafka`
    validate         the command `shipper validate FILE`
    naive            the script that a competent person writes in forty lines, see `naive.py`
    sandbox…         how fast the sandbox takes batches, see `sandbox_row.py`

`--peers` adds other shippers, which have to be installed, with records of an operator and with sparse ones; see
`peers.py` and `docs/performance.md`:

    fluent-bit, fluent-bit-file, syslog-ng, rsyslog

Except for `codec`, `validate` and `sandbox…` the rate is that of the whole process, from its start to its end, of a
peer from its start to the arrival of the last event. Rounds are interleaved, so that a disturbance of the machine meets
all rows alike, and the table shows medians. The rows run on one core and the server on another one. A row whose count
is wrong fails; a row that is slow does not.

`--rows` chooses rows, each with any profile and engine. Those that follow or that are large run only if they are named
there:

    tail-idle        `shipper run` and one file: from the append of an event to the service, one at a time
    tail-busy        the same while another file grows at 20,000 events a second, or as fast as the machine can
    idle-1           `shipper run` at rest, with one file: share of a core over 10 s, and memory; then 20 appends
    idle-1000        the same with 1,000 finished files beside the live one
    idle-10000       the same with 10,000
    backfill-rss     `backfill` of a file of `--large-events` events (as many as `--events`, if not given): its peak RSS

Latency is what is beyond `batch.linger_seconds`, which is 50 ms there; see `tail.py`, which can also be run alone.

    python -m tests.bench --rounds 3 --rows tail-idle,tail-busy,idle-1,idle-1000,idle-10000
    python -m tests.bench --rounds 1 --rows backfill,backfill-rss --large-events 5700000    # 2 GB: half a minute

The peak RSS of the two rows of the last line should be about the same, as memory does not grow with the input.

The sample files are made once by `shipper sample` and kept as `.bench/<profile>-<count>.ndjson`, with their other forms
beside them; delete the large one when it has served.
"""
