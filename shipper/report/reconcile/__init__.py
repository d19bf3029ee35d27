"""The report compared with the ledger: verdicts, their reasons, and how they are written."""
