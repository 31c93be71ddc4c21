"""The job format of Amazon ECS."""
