"""The job format of Google's Vertex AI custom training."""
