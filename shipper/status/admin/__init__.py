"""
What a running shipper shows of itself over HTTP: the status page, metrics, and probes.

It stands in a thread of its own and only looks at what the pipeline puts up on its board, and into the state: so a busy
pipeline cannot hold it up, nor it the pipeline.
"""
