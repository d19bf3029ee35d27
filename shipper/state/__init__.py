"""What is known of delivery: acknowledgements in memory, checkpoints and dead letters on disk."""
