"""Comparison of the report with the ledger: verdicts, explanations of differences, and output."""
