"""What is saved on disk: checkpoints, dead letters, totals, ledger."""
