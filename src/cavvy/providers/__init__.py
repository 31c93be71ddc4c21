"""One file or package per place that GPUs come from, behind the seam in `base`."""
