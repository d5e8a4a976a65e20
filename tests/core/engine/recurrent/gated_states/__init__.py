"""A plugin outside Octavo: a language model with recurrent layers, and the backend that keeps their states."""
