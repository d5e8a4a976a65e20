from octavo.core.api.kv_cache import *
from octavo.core.api.kv_cache import __all__ as __all__
