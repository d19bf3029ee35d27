"""Where records come from: files that are read to their end or followed, and standard input through its spool."""
