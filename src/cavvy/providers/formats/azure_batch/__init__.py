"""The job format of Azure Batch."""
