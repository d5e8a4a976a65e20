from octavo.core.api.kv_cache import *
from octavo.core.api.kv_cache import __all__ as _all
from octavo.core.kv_cache.pool import BlockPool

__all__ = ["BlockPool", *_all]
