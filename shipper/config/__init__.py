"""The settings: every key, where each may be written, and references to secrets."""
