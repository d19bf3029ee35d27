"""
Everything that others write means harm, for half an hour: `python -m tests.siege --seed N --duration S`.

One `shipper run` follows inputs of every form. Good records flow into all of them at a steady rate; between them, and
in files of their own, lies bait. The service and its token endpoint answer in hostile ways between honest ones, clients
of the admin address mean harm, and the settings are read again and again. All good records have to be accepted, the
memory stays bounded, `/healthz` says 200 throughout, the process lives, and no canary is shown anywhere.

- `canaries`: what must be shown nowhere.
- `bait`: records and files that mean harm. Add to its tables.
- `feeds`: what writes the inputs.
- `answers`: what the service says. Add to its tables.
- `visitors`: probes and clients of the admin address. Add to its table.
- `checking`: what must hold.

The records, the service and its books are those of `tests.torture`.
"""
