"""
The pipeline: wires the stages, stops them, and reports what became of the records.

    pipeline    the flow from the source to the service, and how a stop escalates
    stages      the stages between the source and the settlement
    packer      from chunks to batches
    brake       detects an input that is refused almost entirely, or a clock that is behind; `hold` pauses the input
    batching    when a batch closes
    settlement  the last stage: notes what is settled, and saves it; decides whether more may be read
    acks        how far each input is settled without a gap
    observer    a snapshot every second, a line in the log every half minute
    replaying   dead letters that are sent beside the input
    control     does what other commands ask it for while it runs
    reload      which settings can change while it runs
    summary     what a run did
"""

from shipper.pipeline.pipeline import Pipeline, Signals, Source
from shipper.pipeline.reload import Reloading
from shipper.pipeline.summary import Outcome, Summary

__all__ = ["Outcome", "Pipeline", "Reloading", "Signals", "Source", "Summary"]
