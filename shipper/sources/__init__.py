"""
Sources of records: files, read once or followed; standard input and applications, through the spool.

    discovery             finds the input files; `siblings`: rotated generations beside them
    identity              maps files to streams; `register`: what the state store saves about streams
    content, reader       random access to bytes, decompressed if necessary, and chunks of whole records
    once                  reads files to their end; `completion` deletes or moves them
    tail                  when to scan for growing files; `follower`: scans for them; `open_files`: reads them
    spool                 stores input that can be read only once, in `segments`, on a `disk` that may be full
    stdin, feed           fill the spool: from a pipe, from an application
    replay                dead letters
    joined                what a source is; several sources as one
"""
