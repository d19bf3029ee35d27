"""What a run did."""

from __future__ import annotations

from typing import Literal

from shipper.model.records import Totals

Outcome = Literal["finished", "drained", "aborted", "gave_up"]


class Summary(Totals, kw_only=True):
    """
    What a run did; `read == accepted + dead_lettered + duplicates + pending`.

    Attributes:
        outcome: `finished` = read to the end; `drained` = ended before the end of the input; `aborted` = cut off
            with records pending; `gave_up` = the service took nothing for too long.
        message: Why it ended early, or which dead letters an earlier run has left of the same files; empty otherwise.
        engine: `native` or `pure`: what scanned ordinary records.
    """

    batches: int
    requests: int
    retries: int
    seconds: float
    outcome: Outcome
    message: str = ""
    engine: str = ""

    def exit_code(self, *, is_one_shot: bool) -> int:
        """0 all accepted, 3 some are dead letters, 4 something is left to do; a followed input is never at its end."""
        if self.pending or self.outcome in {"aborted", "gave_up"}:
            return 4
        if not is_one_shot:
            return 0
        if self.outcome == "drained":
            return 4
        return 3 if self.dead_lettered else 0
