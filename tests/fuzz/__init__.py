"""
Hostile input: random changes to good and bad samples, and for each part that reads what others wrote, what must hold.

    python -m tests.fuzz [TARGET…] --executions N --seed S

A target is a function of bytes that raises if something does not hold, and tells what became of the input. An input of
which something new becomes is a sample, too, to be changed further; nothing else guides the search. The same seed makes
the same inputs. `guided` runs a target under a coverage-guided fuzzer instead, where one is installed.
"""
