"""Delivers batches to the service: the endpoint, verdicts on answers, the gate, the senders."""
