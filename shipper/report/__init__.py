"""The affiliate daily report: reading it and showing it."""
