"""The settings: all keys, their sources, and references to secrets."""
