"""The JSON Schema in the documentation says what the parser does."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import octavo
from octavo.core.api.errors import ManifestError
from octavo.core.discovery.manifest import parse_manifest
from octavo.core.discovery.manifest_tables import json_schema

ROOT = Path(octavo.__file__).parents[1]
PUBLISHED = ROOT / "docs" / "octavo-plugin.schema.json"

GOOD = """
[plugin]
name = "acme"
api = "1.0"
[platform.acme]
device_type = "acme"
[attention.acme]
platforms = ["acme", "*"]
dtypes = ["bfloat16"]
kv_dtypes = []
head_sizes = { multiple_of = 8, max = 256 }
block_sizes = [16, 32]
[[attention.acme.except]]
when = { features = ["sinks"], arch = "<acme3" }
reason = "no"
[ops.acme]
implements = ["rms_norm"]
platforms = ["acme"]
[hook.acme]
"""


def accepts(text: str) -> bool:
    return not list(jsonschema.Draft202012Validator(json_schema()).iter_errors(tomllib.loads(text)))


def parses(text: str) -> bool:
    try:
        parse_manifest(text, "x")
    except ManifestError:
        return False
    return True


def test_the_published_schema_is_the_parser_s_own() -> None:
    assert json.loads(PUBLISHED.read_text()) == json_schema(), (
        "write it anew: python -m octavo.core.discovery.manifest_tables > docs/octavo-plugin.schema.json"
    )


def test_our_own_manifests_satisfy_it() -> None:
    validator: Any = jsonschema.Draft202012Validator(json_schema())
    paths = [path for part in ("core", "backends", "plugins") for path in (ROOT / part).rglob("octavo-plugin.toml")]
    assert len(paths) >= 5
    for path in paths:
        validator.validate(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('api = "1.0"', ""),
        ('api = "1.0"', 'api = "one"'),
        ('name = "acme"', 'name = "a b"'),
        ("[hook.acme]", "[hooks.acme]"),
        ("[hook.acme]", "[hook.'a b']"),
        ("[16, 32]", "[16, 0]"),
        ("[16, 32]", "[16, 16]"),
        ("[16, 32]", "{ max = 3 }"),
        ('["sinks"]', '["sink"]'),
        ('arch = "<acme3"', 'arch = "<<acme3"'),
        ('reason = "no"', ""),
        ('reason = "no"', 'reason = "no"\nmore = 1'),
        ('["rms_norm"]', '["rms"]'),
        ('["rms_norm"]', '"rms_norm"'),
        ('device_type = "acme"', 'device_type = "acme"\nauto = 1'),
    ],
)
def test_schema_and_parser_agree(old: str, new: str) -> None:
    text = GOOD.replace(old, new, 1) if old else GOOD
    assert accepts(text) is parses(text) is (not old)
