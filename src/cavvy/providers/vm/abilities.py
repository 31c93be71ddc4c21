"""The abilities of `VmProvider`, for manifests, which must not import modules that call a cloud."""

from cavvy.providers.abilities import CHECKS_TASKS, CLOSEABLE, WHO_AM_I

ABILITIES = (CHECKS_TASKS, WHO_AM_I, CLOSEABLE)
