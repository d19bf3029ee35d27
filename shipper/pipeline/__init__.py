"""
The pipeline: connects, stops and observes the stages.

    pipeline    the flow from the source to the service, and how a stop escalates
    packer      chunks to batches; holds input back while nearly all of it is invalid or the clock is wrong
    batching    when a batch closes
    senders     the senders and their shared state
    settlement  the last stage: tracks the settled prefix of each input, saves it, and limits what is in memory
    observer    a snapshot every second, a log line every 30 s
    replaying   dead letters sent beside the input
    control     requests of other commands
    reload      settings that can change during a run
"""
