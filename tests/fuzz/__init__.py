"""
Fuzz everything that reads untrusted bytes: mutate good and bad samples, and check invariants.

    python -m tests.fuzz [TARGET…] --executions N --seed S

A target is a function of bytes that raises if an invariant is broken, and returns an outcome. An input with a new
outcome becomes a sample; nothing else guides the search. The same seed generates the same inputs.
"""
