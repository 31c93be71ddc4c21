"""The providers of GPUs, one module or package for each, behind the interface in `base`."""
