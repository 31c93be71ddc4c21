"""The job format of AWS Batch."""
