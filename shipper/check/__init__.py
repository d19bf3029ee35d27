"""The part of `shipper check` that uses the network."""
