"""The installed command against a real server: it loses nothing, and repeats are bounded."""
