"""What would happen, before anything runs: a run from its configuration, and a transfer of weights from its layouts."""
