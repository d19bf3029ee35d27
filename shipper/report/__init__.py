"""The affiliate daily report: fetching, checking, storing, rendering, and comparing it with the ledger."""
