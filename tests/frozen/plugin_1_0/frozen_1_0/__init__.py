"""A plugin as it was written for octavo.api 1.0. It imports nothing of Octavo but `octavo.api`."""
