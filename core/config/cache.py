from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config._field import option


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The KV cache's size, shape and sharing."""

    block_size: int | None = option(None, help="tokens a KV block (default: what the backends prefer, 16 if free)")
    kv_cache_memory_bytes: int | None = option(None, help="bytes for the KV cache; accepts 512M, 2GiB, …")
    gpu_memory_utilization: float = option(0.9, help="share of a device's memory that may be used, where it has its own")
    num_blocks: int | None = option(None, help="KV blocks a group, overriding the memory-based number (tests, simulation)")
    kv_cache_dtype: str = option("auto", help="dtype of cached K and V: auto = the model's")
    enable_prefix_caching: bool = option(True, help="reuse the KV blocks of equal prefixes")
    prefix_hash: str = option("sha256", help="hash of the prefix cache: sha256, or xxh3 (fast, not collision-proof)")
