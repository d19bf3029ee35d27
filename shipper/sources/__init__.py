"""
Where records come from: files that are read to their end or followed, and standard input through its spool.

    discovery           which files there are
    identity            which stream a file is; `register` is what the state store remembers for it
    content, reader     bytes by offset, decompressed if need be, and chunks of whole records
    files               files to their end, `completion` puts them away
    follow, followed    files as they grow: what to do at each step, and when
    spool               standard input, kept in segments; `incoming` cuts what arrives
    joined              several of these as one
"""
