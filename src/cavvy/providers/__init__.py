"""The providers of GPUs, one file or package each, behind the interface in `base`."""
