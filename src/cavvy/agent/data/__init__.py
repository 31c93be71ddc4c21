"""Downloads the work's inputs, uploads its outputs, and provides its volumes."""
