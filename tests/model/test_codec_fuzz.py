"""The codec against random and mutated records."""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random

from shipper.sandbox.samples import sample_lines
from tests.codec_fuzz import try_some
from tests.conftest import SEED

RECORDS = 20_000


def test_no_input_raises_out_of_the_codec_and_no_verdict_depends_on_neighbours():
    rng = Random(SEED)
    samples = [line.rstrip() for line in sample_lines(500, seed=SEED, end=datetime(2026, 11, 20, tzinfo=UTC))]
    tried = 0
    while tried < RECORDS:
        tried += try_some(rng, samples)
