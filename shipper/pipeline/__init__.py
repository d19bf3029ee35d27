"""
The pipeline: wires the stages, stops them, and tells what became of the records.

    pipeline    the flow from the source to the service, and the ladder of a stop
    middle      what stands between the source and the settlement: `in_process`, or `in_workers`
    worker      one of several processes; `channel` is what it says to the one that started it
    packer      from chunks to batches
    brake       notices an input that is unlike records, or a clock that is behind; `hold` waits until that is over
    batching    when a batch closes
    settlement  the last stage: what is settled, and saves it; whether more may be begun
    acks        up to where each input is settled without a gap
    observer    what can be seen of it: a snapshot every second, a line in the log every half minute
    reload      which settings can change while it runs
    summary     what a run did
"""

from shipper.pipeline.pipeline import Pipeline, Signals, Source, Workers
from shipper.pipeline.reload import Reloading
from shipper.pipeline.summary import Outcome, Summary

__all__ = ["Outcome", "Pipeline", "Reloading", "Signals", "Source", "Summary", "Workers"]
