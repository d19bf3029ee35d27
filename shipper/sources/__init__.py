"""
Where records come from: files, to their end or as they grow; standard input and applications, through the spool.

    discovery             which files there are; `siblings`: generations beside them
    identity              which stream a file is; `register`: what the state store saves about it
    content, reader       bytes by offset, decompressed if need be, and chunks of whole records
    once                  files to their end; `completion` puts them away
    tail                  files as they grow: when to look, by `follower`; `open_files`: what is read
    spool                 input that can be read only once, kept in `segments`
    stdin                 fills the spool from a pipe; `incoming` cuts what arrives
    feed                  fills it from an application
    joined                several sources as one
"""
