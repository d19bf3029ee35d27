"""The installed command as a process, against a real server: what is lost is 0, what is repeated is bounded."""
