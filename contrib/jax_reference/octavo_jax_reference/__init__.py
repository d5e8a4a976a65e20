"""A JAX platform and attention backend for Octavo. Imports only `octavo.api`."""
