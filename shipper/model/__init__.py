"""Plain values: records, the service's documents, the framing of inputs, and errors."""
