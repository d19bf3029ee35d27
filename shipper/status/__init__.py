"""How things stand: the snapshot of a running shipper, what is read of the state, and the words for both."""
