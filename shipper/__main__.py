"""`python -m shipper` is `shipper`."""

from shipper.cli import main

main()
