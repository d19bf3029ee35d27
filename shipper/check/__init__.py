"""What `shipper check` looks at on the network."""
