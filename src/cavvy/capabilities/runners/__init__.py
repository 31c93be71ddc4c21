"""Runners for CI: the jobs of GitHub Actions and GitLab CI run as jobs of Cavvy."""
