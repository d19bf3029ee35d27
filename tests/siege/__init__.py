"""
Mix hostile input, answers and clients with good records: `python -m tests.siege --seed N --duration S`.

One `shipper run` follows inputs of every form. Good records are written to all of them at a steady rate, mixed with
hostile records and files. The service and its token endpoint send some hostile answers, clients attack the admin
address, and the settings are reloaded repeatedly. All good records must be accepted, memory use must stay bounded,
`/healthz` must always return 200, the process must not exit, and no output may show a canary.

- `canaries`: strings that no output may show.
- `hostile`: hostile records and files. Add to its tables.
- `feeds`: the writers of the inputs.
- `answers`: hostile answers of the service. Add to its tables.
- `visitors`: probes and clients of the admin address. Add to its table.
- `checking`: the checks at the end.

The records, the service and its journal come from `tests.torture`.
"""
