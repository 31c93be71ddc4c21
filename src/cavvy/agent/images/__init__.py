"""Container images of the work: fetches, builds and checks them before the work runs."""
