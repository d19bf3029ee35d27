"""Stands in the place of attrs, which only tests have, and which every start of `shipper` would load beside rich."""

raise ImportError("it is not installed where shipper is used")
