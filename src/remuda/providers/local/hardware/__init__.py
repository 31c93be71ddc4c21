"""What this machine has: CPUs, memory, disk and accelerators, each vendor read in its own way."""
