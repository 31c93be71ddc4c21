"""Changes the sizes of running elastic jobs: they grow when nodes are free, and give nodes back to
jobs that wait for them."""
