"""The job format of Amazon SageMaker training."""
