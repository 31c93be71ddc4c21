"""The routes of the API. Each module contains one group of routes, or code that several groups
use."""
