"""The status of a run: snapshots of the running shipper and of the state, and their description."""
