from octavo.core.api import API_VERSION

__all__ = ["API_VERSION"]
