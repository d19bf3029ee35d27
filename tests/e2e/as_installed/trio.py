"""Stands in the place of trio, which only tests have, and which every start of `shipper` would load beside httpx."""

raise ImportError("it is not installed where shipper is used")
