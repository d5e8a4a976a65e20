"""KV blocks: the pool, the prefix cache, and a manager for each KV spec. No torch."""

from octavo.core.kv_cache.manager import Hit, KVCacheManager
from octavo.core.kv_cache.pool import BlockPool

__all__ = ["BlockPool", "Hit", "KVCacheManager"]
