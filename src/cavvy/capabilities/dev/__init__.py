"""Sessions of interactive work: a shell, an editor or Jupyter on a machine that jobs can use."""
