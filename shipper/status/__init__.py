"""The status of a run: the snapshot of a running shipper, what is read from the state, and the wording of both."""
