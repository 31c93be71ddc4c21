"""The control plane: reconcilers that observe, decide and act, the clock, and the worklist."""
