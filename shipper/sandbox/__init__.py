"""The service itself, on loopback: a gateway, the intake, the report, and sample events."""
