"""Checks an `EngineConfig` and puts its values into their canonical form.

Every mistake is one `UsageError` that says what to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

from octavo.core.api.errors import UsageError
from octavo.core.api.manifest import LAYER_KINDS
from octavo.core.api.ops import OPS
from octavo.core.config.suggest import nearest

if TYPE_CHECKING:
    from octavo.core.config.engine import EngineConfig

EVERY_LAYER = "*"
"""The key of ``attention_backend`` that stands for every layer."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_LOWEST: Mapping[str, float] = {
    "max_model_len": 1,
    "block_size": 1,
    "kv_cache_memory_bytes": 1,
    "num_blocks": 2,  # one of them is the null block
    "device": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "num_speculative_tokens": 1,
}
_INT32_MAX = 2**31 - 1  # block ids, token counts and what indexes by them are int32
_HIGHEST: Mapping[str, float] = {
    "max_model_len": _INT32_MAX,
    "block_size": _INT32_MAX,
    "num_blocks": _INT32_MAX,
    "max_num_seqs": 65536,
    "max_num_batched_tokens": _INT32_MAX,
    "num_speculative_tokens": 64,
}

_WORDS: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "kv_cache_dtype": ("auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"),
    "prefix_hash": ("sha256", "xxh3"),
}

_ALIASES: Mapping[str, str] = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "fp8_e4m3",
}


def validate(config: EngineConfig) -> EngineConfig:
    """The configuration in canonical form. Raises `UsageError`."""
    for part, option in config.options():
        path = f"{part}.{option.name}"
        value = config.get(path)
        good = canonical(option.name, value, _types(part)[option.name])
        if good is not value:
            config = config.with_value(path, good)
    return config


def canonical(name: str, value: Any, annotation: Any) -> Any:
    """One option's value, checked. Raises `UsageError`."""
    if name in _READERS:
        value = _READERS[name](name, value)
    _check_type(name, value, annotation)
    if name in _WORDS:
        value = _word(name, value)
    _check_range(name, value)
    return value


@cache
def _types(part: str) -> Mapping[str, Any]:
    from octavo.core.config.engine import EngineConfig

    return get_type_hints(type(getattr(EngineConfig(), part)))


def byte_count(name: str, value: Any) -> Any:
    """``"512M"`` → 512 000 000, ``"2GiB"`` → 2 147 483 648; anything but text as it is. Raises `UsageError`."""
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", value.lower())
    if not found or found[2] not in _UNITS:
        raise UsageError(f"{name} must be a number of bytes, not {value!r}", hint="write 4000000000, 512M or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def _attention_backends(name: str, value: Any) -> Any:
    """``"triton"``, ``"full_attention=a,draft=b"`` or a mapping → kind, group name or ``"*"`` → backend."""
    if isinstance(value, str) and "=" not in value:
        text = value.strip()
        return MappingProxyType({EVERY_LAYER: text} if text and text != "auto" else {})
    pairs = _pairs(name, value, "NAME, or kind=NAME,kind=NAME")
    for key in pairs if isinstance(pairs, Mapping) else ():
        if isinstance(key, str) and key != EVERY_LAYER and key.partition(".")[0] not in LAYER_KINDS:
            raise UsageError(
                f"{name}: {key!r} isn't a kind of layer" + nearest(key, LAYER_KINDS), hint=f"kinds: {', '.join(LAYER_KINDS)}"
            )
    return pairs


def _ops(name: str, value: Any) -> Any:
    """``"rms_norm=acme"``, several of them, or a mapping → op → implementation."""
    if isinstance(value, (list, tuple)):
        value = ",".join(value) if all(isinstance(item, str) for item in value) else value
    pairs = _pairs(name, value, "OP=NAME")
    for key in pairs if isinstance(pairs, Mapping) else ():
        if key not in OPS:
            raise UsageError(f"{name}: {key!r} isn't an op" + nearest(str(key), OPS), hint=f"ops: {', '.join(OPS)}")
    return pairs


def _pairs(name: str, value: Any, form: str) -> Any:
    if value is None:
        return MappingProxyType({})
    if isinstance(value, str):
        items = [item.strip() for item in value.split(",") if item.strip()]
        split = [(key.strip(), target.strip()) for key, _, target in (item.partition("=") for item in items)]
        if not all(key and target and "=" not in target for key, target in split):
            raise UsageError(f"{name} must be {form}, not {value!r}")
        if len({key for key, _ in split}) < len(split):
            raise UsageError(f"{name}: {value!r} names one key twice")
        return MappingProxyType(dict(split))
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


def _plugins(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return tuple(item.strip() for item in value.split(",") if item.strip())
    return tuple(value) if isinstance(value, list) else value


def _model(name: str, value: Any) -> Any:
    import os

    return os.fspath(value) if isinstance(value, os.PathLike) else value


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "model": _model,
    "kv_cache_memory_bytes": byte_count,
    "attention_backend": _attention_backends,
    "op": _ops,
    "plugin": _plugins,
}


def _check_type(name: str, value: Any, annotation: Any) -> None:
    what = _expected(annotation)
    good = {
        "text": lambda: isinstance(value, str),
        "true or false": lambda: isinstance(value, bool),
        "a whole number": lambda: isinstance(value, int) and not isinstance(value, bool),
        "a number": lambda: isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        "a mapping of names to names": lambda: isinstance(value, Mapping) and _texts([*value.keys(), *value.values()]),
        "a list of names": lambda: isinstance(value, tuple) and _texts(value),
    }
    if name == "platform" and value == "":
        raise UsageError("platform must name a platform plugin, not ''", hint="leave it out to let Octavo choose")
    optional = type(None) in getattr(annotation, "__args__", ())
    if not (optional and value is None) and not good[what]():
        raise UsageError(f"{name} must be {what}, not {value!r}")


def _expected(annotation: Any) -> str:
    """The annotation in words."""
    kinds = [kind for kind in getattr(annotation, "__args__", ()) if kind is not type(None)]
    origin = getattr(annotation, "__origin__", None)
    if origin is tuple:
        return "a list of names"
    if origin is not None:
        return "a mapping of names to names"
    plain = kinds[0] if kinds else annotation
    return {str: "text", bool: "true or false", int: "a whole number", float: "a number"}[plain]


def _texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and value for value in values)


def _word(name: str, value: str) -> str:
    word = _ALIASES.get(value, value)
    if word not in _WORDS[name]:
        raise UsageError(f"{name} must be one of {', '.join(_WORDS[name])}, not {value!r}" + nearest(value, _WORDS[name]))
    return word


def _check_range(name: str, value: Any) -> None:
    if name == "gpu_memory_utilization" and not 0 < value <= 1:
        raise UsageError(f"{name} must be above 0 and at most 1, not {value!r}")
    if value is None or isinstance(value, bool):
        return
    if name == "seed" and not -(2**63) <= value < 2**63:
        raise UsageError(f"seed must fit in 64 bits, not {value!r}")
    if name in _LOWEST and value < _LOWEST[name]:
        raise UsageError(f"{name} must be at least {_LOWEST[name]}, not {value!r}")
    if name in _HIGHEST and value > _HIGHEST[name]:
        raise UsageError(f"{name} must be at most {_HIGHEST[name]}, not {value!r}")
