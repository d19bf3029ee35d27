"""
An adversary that tries to make shipper lose a record: `python -m tests.torture --seed N --duration S`.

A producer writes records whose content is a function of their id, by three lanes: log files that `shipper run`
follows, a pipe that `shipper pipe` reads, and exports that `shipper backfill` ships. The service, the processes, the
disk, the clock and the files go wrong in turn, in an order that the seed determines. Then it is quiet, and every record
has to be where it belongs.

- `records`: what is written, what of it the service may have, and what must become a dead letter.
- `service`, `books`: the service, and what it was sent when and by whom.
- `producing`: who writes records at a rate.
- `lanes`, `application`, `pipe`, `exports`: the shippers and what feeds them.
- `faults`: the table of what goes wrong; add to it there.
- `adversary`: deals the faults.
- `checking`: what must hold in the end.
"""
