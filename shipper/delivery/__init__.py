"""From batches to the service: the endpoint, the verdict on an answer, the gate, the senders."""
