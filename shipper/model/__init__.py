"""The values that flow: records, the service's documents, the framing of an input, and errors."""
