"""The providers of GPUs. Each is a module or package that implements the interface in `base`."""
