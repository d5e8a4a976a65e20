"""The engine's messages as bytes, for executors written elsewhere. Nothing is pickled."""

from octavo.core.engine.wire import decode, encode

__all__ = ["decode", "encode"]
