"""What the process asks of its machine: permissions, programs, addresses and sockets, memory, threads at work."""
