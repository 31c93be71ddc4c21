"""Queue order, gangs and packing on shared hosts. No I/O."""
