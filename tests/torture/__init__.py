"""
An adversary that tries to make shipper lose a record: `python -m tests.torture --seed N --duration S`.

Producers write records whose content is a function of their number to four lanes: log files that `shipper run` follows
with and without `input.on_complete`, a pipe that `shipper pipe` reads, and exports that `shipper backfill` ships.
Faults hit the service, the processes, the disk, the clock and the files in an order determined by the seed. After the
faults, every record must be accepted or be a dead letter, as planned.

- `records`: the records, with the expected event or the rule by which each becomes a dead letter.
- `service`, `journal`: the service, and which process delivered what and when.
- `lanes`, `application`, `live`, `pipe`, `exports`: the shippers and their inputs.
- `faults`, `schedule`: the faults, and their order. Add faults to the tables.
- `checking`: the checks at the end.
"""
