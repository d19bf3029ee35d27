"""The state on disk: checkpoints, dead letters, totals, ledger."""
