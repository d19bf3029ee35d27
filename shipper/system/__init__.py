"""The machine and the operating system: permissions, programs, addresses and sockets, memory, threads at work."""
