"""
Where records come from: files, to their end or as they grow; standard input and applications, through the spool.

    discovery           which files there are
    identity            which stream a file is; `register` is what the state store remembers for it
    content, reader     bytes by offset, decompressed if need be, and chunks of whole records
    files               files to their end, `completion` puts them away
    follow, open_files  files as they grow: which there are, at each look; what is held open, and is read
    followed            when to do so
    spool               what can be read only once, kept in `segments`
    standard_input      one thing that fills it; `incoming` cuts what arrives
    fed, given          the other: the application around it, and its records as lines
    joined              several of these as one
"""
