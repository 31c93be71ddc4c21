"""Queue order, gangs and packing on shared hosts; pure."""
