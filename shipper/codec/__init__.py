"""Validates records and converts them to events: the rules, a fast path for whole chunks, a slow path by line."""
