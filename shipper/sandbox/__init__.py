"""A simulation of the service on a loopback address: gateway, intake, report, and sample events."""
