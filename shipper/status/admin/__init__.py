"""
The status page, metrics and probes of a running shipper, over HTTP.

Runs in its own thread and only reads the last snapshot and the state, so neither can block the other.
"""
