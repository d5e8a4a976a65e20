"""The tables and keys of an ``octavo-plugin.toml``: what the parser accepts and what the JSON Schema says, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.api.manifest import (
    DTYPES,
    ENTRY_POINT_GROUPS,
    FEATURES,
    LAYER_KINDS,
    AttentionManifest,
    Condition,
    ModelManifest,
    Numerics,
    OpsManifest,
    PlatformManifest,
    PluginKind,
    Restriction,
    SimpleManifest,
)
from octavo.core.api.ops import OPS
from octavo.core.discovery.values import (
    API,
    ARCH,
    NAME,
    TARGET,
    Flag,
    Integers,
    Key,
    ListOf,
    Requirements,
    Table,
    Tables,
    Text,
    names,
    words,
)

_REQUIRES = Key(Requirements(), "distributions it needs, in pip's notation; read from installed metadata")
_PROBE = Key(Text(TARGET, "module:function"), "module:function that returns a ProbeResult in < 100 ms without importing torch")
_AUTO = Key(Flag(), "false: used only when named")
_PLATFORMS = Key(
    ListOf(Text(r"^(\*|[A-Za-z0-9][A-Za-z0-9._-]*)$", "a platform's name, or *")),
    'platform names, or "*" for every platform whose arrays are torch tensors',
    required=True,
)

CONDITION = Table(
    {
        "dtypes": Key(words(DTYPES), "activation dtypes, any of them"),
        "kv_dtypes": Key(words(DTYPES), "cache dtypes, any of them"),
        "head_sizes": Key(Integers(), "head sizes, any of them"),
        "block_sizes": Key(Integers(), "block sizes, any of them"),
        "features": Key(words(FEATURES), "features, all of them asked for"),
        "kinds": Key(words(LAYER_KINDS), "layer kinds, any of them"),
        "platform": Key(Text(NAME, "a platform's name"), "on this platform"),
        "arch": Key(Text(ARCH, 'an arch or a comparison such as "<acme3"'), "on these archs, in the platform's own order"),
    },
    Condition,
)

RESTRICTION = Table(
    {
        "when": Key(CONDITION, "when it applies: AND over the keys", required=True),
        "reason": Key(Text(), "why, for people", required=True),
    },
    Restriction,
)

NUMERICS = Table(
    {
        "q_prescaled": Key(Flag(), "q is multiplied by the scale in its own dtype"),
        "soft_cap_approximate": Key(Flag(), "the soft cap uses an approximate tanh"),
    },
    Numerics,
)

PLUGIN = Table(
    {
        "name": Key(Text(NAME, "a name of letters, digits, '.', '_' and '-'"), "the plugin's name", required=True),
        "api": Key(Text(API, 'the lowest octavo.api it needs, such as "1.0"'), "lowest octavo.api it needs", required=True),
        "autoload": Key(Flag(), "true: its hooks and ops apply without being asked for"),
    }
)

PLATFORM = Table(
    {
        "kind": Key(Text(words=("accelerator", "host")), "automatic selection tries accelerators first"),
        "device_type": Key(Text(r"^[a-z0-9_]+$", "a torch device type, or none"), "torch device type, or none", required=True),
        "archs": Key(names("an arch"), "device architectures, ascending: what except rules compare with"),
        "requires": _REQUIRES,
        "probe": _PROBE,
        "auto": _AUTO,
        "attention": Key(names("an attention backend"), "preference order of attention backends"),
        "ops": Key(names("an ops plugin"), "its preferred op implementations"),
    },
    PlatformManifest,
)

ATTENTION = Table(
    {
        "platforms": _PLATFORMS,
        "requires": _REQUIRES,
        "probe": _PROBE,
        "auto": _AUTO,
        "dtypes": Key(words(DTYPES), "dtypes of q, k, v and the output", required=True),
        "kv_dtypes": Key(words(DTYPES), "dtypes of the cache", required=True),
        "head_sizes": Key(Integers(), "head sizes of q and k; [] means none", required=True),
        "block_sizes": Key(Integers(), "tokens a block; [] means none", required=True),
        "kinds": Key(words(LAYER_KINDS), "layer kinds it serves (default: full_attention)"),
        "features": Key(words(FEATURES), "what it can do; anything not listed is refused"),
        "needs_host_lengths": Key(Flag(), "true: exact lengths on the host every step"),
        "numerics": Key(NUMERICS, "deviations that widen the oracle's tolerance"),
        "except": Key(Tables(RESTRICTION), "combinations that don't work", field="excepts"),
        "withheld": Key(Tables(RESTRICTION), "combinations that would work but aren't offered"),
    },
    AttentionManifest,
)

OPS_TABLE = Table(
    {
        "implements": Key(words(OPS), "the ops it implements", required=True),
        "platforms": _PLATFORMS,
        "when": Key(CONDITION, "when it applies"),
        "requires": _REQUIRES,
        "probe": _PROBE,
    },
    OpsManifest,
)

MODEL = Table(
    {
        "architectures": Key(names("an architecture"), "architectures of a config.json"),
        "gguf": Key(names("a GGUF architecture"), "general.architecture of a GGUF"),
        "requires": _REQUIRES,
    },
    ModelManifest,
)

SIMPLE = Table(
    {
        "help": Key(Text(), "one line for people"),
        "requires": _REQUIRES,
        "specs": Key(names("a KV spec"), "kv_manager: the KV specs it manages"),
    },
    SimpleManifest,
)

TABLES: Mapping[PluginKind, Table] = {
    kind: {"platform": PLATFORM, "attention": ATTENTION, "ops": OPS_TABLE, "model": MODEL}.get(kind, SIMPLE)
    for kind in ENTRY_POINT_GROUPS
}
"""The table of each kind of plugin: ``[platform.NAME]``, ``[attention.NAME]``, …"""


def json_schema() -> dict[str, Any]:
    """JSON Schema of the whole file, for editors; ``docs/octavo-plugin.schema.json`` is a copy of it."""
    kinds: dict[str, Any] = {
        kind: {
            "type": "object",
            "propertyNames": {"pattern": NAME},
            "additionalProperties": table.schema(),
            "description": f"entries of the entry-point group {ENTRY_POINT_GROUPS[kind]}",
        }
        for kind, table in TABLES.items()
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "octavo-plugin.toml",
        "description": "The manifest of an Octavo plugin",
        "type": "object",
        "properties": {"plugin": PLUGIN.schema(), **kinds},
        "required": ["plugin"],
        "additionalProperties": False,
    }


if __name__ == "__main__":
    import json
    import sys

    json.dump(json_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
