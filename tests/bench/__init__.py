"""
Measure throughput and latency, and compare with other programs: `python -m tests.bench --rounds 5 --events 500000`.

Each row is a separate process; those that send use the same server, which counts and discards the events. These rows
run on all profiles of `shipper sample` (`operator`, or `NAME@PROFILE`), with the native extension and without it
(`NAME:pure`):

    codec            the codec alone, no network, no state; timed inside the process
    backfill         the whole command `shipper backfill FILE`
    pipe             the whole command line `cat FILE | shipper pipe`

These run on the profile `operator`, with the native extension if it is installed:

    floor            ready-made request bodies posted by httpx: no reading and no validation
    backfill-sloppy  `backfill` of records that all need normalising
    backfill-csv     the same with CSV and a mapping
    backfill-many    the same with a folder of files of 500 events each: 1,000 files for 500,000 events
    backfill-gz      the same with one gzip file
    backfill-zst     the same with one zstd file
    backfill-…       the same to a server that is slow, faulty, picky or speaks TLS, and on all cores
    kafka            `backfill kafka://TOPIC` of the same records, in a topic of four partitions; needs `make kafka`
    validate         the command `shipper validate FILE`
    naive            a straightforward script of forty lines, see `naive.py`
    sandbox…         throughput of the sandbox, see `programs.py`

`--peers` adds other installed shippers, with the profiles `operator` and `sparse`; see `peers.py` and
`docs/performance.md`:

    fluent-bit, fluent-bit-file, syslog-ng, rsyslog

Except for `codec`, `validate` and `sandbox…`, the rate is measured from the start of the process to its end; for a
peer, to the arrival of the last event. Rounds are interleaved, so that other load affects all rows alike, and the table
shows medians. The rows run on one core and the server on another one. A row with a wrong count fails; a slow row does
not.

`--rows` chooses rows, each with any profile and engine. These run only if named there:

    tail-idle        `shipper run` with one file: latency from the append of an event to the service, one at a time
    tail-busy        the same while another file grows at up to 20,000 events per second
    idle-1           `shipper run` at rest, with one file: share of a core over 10 s, and memory; then 20 appends
    idle-1000        the same with 1,000 finished files in addition
    idle-10000       the same with 10,000
    backfill-rss     peak RSS of a `backfill` of `--large-events` events (default: `--events`)

Latency is measured without `batch.linger_seconds`, which is 50 ms there; see `tail.py`, which can also be run alone.

    python -m tests.bench --rounds 3 --rows tail-idle,tail-busy,idle-1,idle-1000,idle-10000
    python -m tests.bench --rounds 1 --rows backfill,backfill-rss --large-events 5700000    # 2 GB: half a minute

The two rows of the last command should have about the same peak RSS, because memory does not grow with the input.

The sample files are created once by `shipper sample` and kept as `.bench/<profile>-<count>.ndjson`, with their other
forms; delete the large one afterwards.
"""
