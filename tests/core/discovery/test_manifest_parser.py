from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.api.errors import ManifestError
from octavo.core.api.manifest import ENTRY_POINT_GROUPS, IntRange
from octavo.core.discovery.manifest import manifest_problems, parse_manifest, read_manifest

HEAD = """
[plugin]
name = "acme"
api = "1.0"
"""
ATTENTION = """
[attention.acme-paged]
platforms = ["acme"]
dtypes = ["bfloat16"]
kv_dtypes = ["bfloat16"]
head_sizes = [64, 128]
block_sizes = { multiple_of = 16 }
"""


def parse(text: str) -> Any:
    return parse_manifest(text, "/x/octavo-plugin.toml")


def refused(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("/x/octavo-plugin.toml: "), "a message names its file first"
    assert "\n" not in message
    return message.removeprefix("/x/octavo-plugin.toml: ")


def test_a_full_manifest_is_read_into_its_dataclasses() -> None:
    manifest = parse(
        HEAD
        + """autoload = true
        [platform.acme]
        kind = "accelerator"
        device_type = "acme"
        archs = ["acme1", "acme2"]
        probe = "acme.probe:probe"
        auto = false
        attention = ["acme-paged"]
        ops = ["acme-norms"]
        requires = ["acme-kernels>=2,<3"]
        """
        + ATTENTION
        + """features = ["causal", "gqa"]
        kinds = ["full_attention", "draft"]
        needs_host_lengths = true
        numerics = { q_prescaled = true }
        [[attention.acme-paged.except]]
        when = { kv_dtypes = ["fp8_e4m3"], features = ["sinks"], platform = "acme", arch = "<acme2" }
        reason = "no sinks in the fp8 kernel"
        [[attention.acme-paged.withheld]]
        when = { features = ["alibi"] }
        reason = "slow path only"
        [ops.acme-norms]
        implements = ["rms_norm"]
        platforms = ["acme"]
        when = { dtypes = ["bfloat16"] }
        [model.acme-lm]
        architectures = ["AcmeForCausalLM"]
        gguf = ["acme"]
        [kv_manager.acme-kv]
        specs = ["AcmeSpec"]
        [command.acme]
        help = "does things"
        """
    )
    assert (manifest.name, manifest.api, manifest.autoload) == ("acme", (1, 0), True)
    platform = manifest.platforms["acme"]
    assert (platform.archs, platform.auto, platform.requires) == (("acme1", "acme2"), False, ("acme-kernels>=2,<3",))
    backend = manifest.attention["acme-paged"]
    assert backend.head_sizes == IntRange(values=(64, 128))
    assert backend.block_sizes == IntRange(multiple_of=16)
    assert backend.numerics.q_prescaled
    assert not backend.numerics.soft_cap_approximate
    assert backend.excepts[0].when.arch == "<acme2"
    assert backend.withheld[0].reason == "slow path only"
    assert manifest.ops["acme-norms"].when.dtypes == ("bfloat16",)
    assert manifest.models["acme-lm"].gguf == ("acme",)
    assert manifest.others["kv_manager"]["acme-kv"].specs == ("AcmeSpec",)
    assert manifest.others["command"]["acme"].kind == "command"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "isn't TOML"),
        ("[platform.x]\ndevice_type = 'x'", "plugin: the [plugin] table is missing"),
        (HEAD + "naem = 'x'", "plugin.naem: unknown key; did you mean 'name'"),
        (HEAD + "[attentoin.x]", "attentoin: unknown table; did you mean 'attention'"),
        (HEAD.replace('"1.0"', '"1"'), "plugin.api: must be the lowest octavo.api it needs"),
        (HEAD.replace('"1.0"', "1.0"), "plugin.api: must be the lowest octavo.api it needs"),
        (HEAD.replace('api = "1.0"', ""), "plugin.api: is missing"),
        (HEAD.replace("acme", "a cme"), "plugin.name: must be a name of letters"),
        (HEAD + "autoload = 'yes'", "plugin.autoload: must be true or false, not a string ('yes')"),
        (HEAD + "[platform.x]", "platform.x.device_type: is missing"),
        (HEAD + "[platform.x]\ndevice_type = 'x'\nkind = 'gpu'", "platform.x.kind: 'gpu' isn't one of accelerator, host"),
        (HEAD + "[platform.x]\ndevice_type = 'x'\nprobe = 'probe'", "platform.x.probe: must be module:function, not 'probe'"),
        (HEAD + "[platform.x]\ndevice_type = 'x'\narchs = ['a', 'a']", "platform.x.archs: 'a' is listed twice"),
        (HEAD + "[platform.x]\ndevice_type = 'x'\nrequires = ['a b c']", "platform.x.requires[0]: 'a b c' isn't a requirement"),
        (HEAD + "[platform.x]\ndevice_type = 'none'\nkind = 'host'", "platform.x.device_type: 'none' can't be the host"),
        (HEAD + "[platform]\nx = 1", "platform: must hold named tables"),
        (HEAD + "[platform.'a b']\ndevice_type = 'x'", "platform.a b: isn't a name"),
        (HEAD + ATTENTION + "features = ['sliding_windw']", "features[0]: 'sliding_windw' isn't one of"),
        (HEAD + ATTENTION + "features = ['sliding_windw']", "did you mean 'sliding_window'"),
        (HEAD + ATTENTION + "kinds = ['full']", "kinds[0]: 'full' isn't one of"),
        (HEAD + ATTENTION.replace("['bfloat16']", "['bf16']").replace('["bfloat16"]', '["bf16"]'), "dtypes[0]: 'bf16' isn't"),
        (HEAD + ATTENTION.replace("[64, 128]", "[64, -1]"), "head_sizes: must hold positive integers, not -1"),
        (HEAD + ATTENTION.replace("[64, 128]", "[64, 64]"), "head_sizes: lists a number twice"),
        (HEAD + ATTENTION.replace("[64, 128]", "64"), "head_sizes: must be a list of integers or"),
        (HEAD + ATTENTION.replace("[64, 128]", "[true]"), "head_sizes: must hold positive integers, not True"),
        (
            HEAD + ATTENTION.replace("multiple_of", "multipleof"),
            "block_sizes.multipleof: unknown key; did you mean 'multiple_of'",
        ),
        (HEAD + ATTENTION.replace("multiple_of = 16", "multiple_of = 16, max = 8"), "block_sizes.max: is below multiple_of"),
        (HEAD + ATTENTION.replace("multiple_of = 16", "max = 8"), "block_sizes.multiple_of: is missing"),
        (HEAD + ATTENTION + "[[attention.acme-paged.except]]\nreason = 'x'", "except[0].when: is missing"),
        (HEAD + ATTENTION + "[[attention.acme-paged.except]]\nwhen = {}\nreason = 'x'", "except[0].when: is empty"),
        (HEAD + ATTENTION + "except = 'x'", "except: must be an array of tables, not a string"),
        (HEAD + "[ops.x]\nimplements = ['rms_nrm']\nplatforms = ['x']", "ops.x.implements[0]: 'rms_nrm' isn't one of"),
        (HEAD + "[hook.x]\nspecs = ['y']", "hook.x.specs: is for [kv_manager.NAME] only"),
    ],
)
def test_each_mistake_is_one_line_that_names_file_and_key(text: str, says: str) -> None:
    assert says in refused(text)


def test_an_empty_list_means_none_and_never_any() -> None:
    backend = parse(HEAD + ATTENTION.replace("[64, 128]", "[]")).attention["acme-paged"]
    assert not any(size in backend.head_sizes for size in range(1, 513))


def test_the_first_mistake_is_raised_and_all_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "octavo-plugin.toml"
    path.write_text(HEAD + "x = 1\ny = 2\n[nope.z]")
    with pytest.raises(ManifestError, match="and 2 more"):
        read_manifest(path)
    problems = manifest_problems(path)
    assert len(problems) == 3
    assert all(line.startswith(f"{path}: ") for line in problems)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="can't be read: No such file"):
        read_manifest(tmp_path / "octavo-plugin.toml")
    (tmp_path / "octavo-plugin.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ManifestError, match="isn't UTF-8"):
        read_manifest(tmp_path / "octavo-plugin.toml")
    assert len(manifest_problems(tmp_path / "octavo-plugin.toml")) == 1


_LEAVES = st.one_of(
    st.booleans(), st.integers(-5, 300), st.sampled_from(["acme", "bfloat16", "causal", "a:b", "", "1.0"]), st.floats(0, 1)
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["when", "reason", "x"]), inner, max_size=2),
    max_leaves=6,
)


@given(
    kind=st.sampled_from(sorted(ENTRY_POINT_GROUPS)),
    key=st.sampled_from(["platforms", "dtypes", "head_sizes", "except", "numerics", "probe", "when", "implements", "requires"]),
    value=_VALUES,
)
def test_any_value_anywhere_is_read_or_refused_by_name(kind: str, key: str, value: Any) -> None:
    def toml(item: Any) -> str:
        if isinstance(item, bool):
            return "true" if item else "false"
        if isinstance(item, str):
            return f'"{item}"'
        if isinstance(item, list):
            return "[" + ", ".join(map(toml, item)) + "]"
        if isinstance(item, dict):
            return "{" + ", ".join(f"{name} = {toml(inner)}" for name, inner in item.items()) + "}"
        return repr(item)

    text = HEAD + f"[{kind}.x]\n{key} = {toml(value)}\n"
    try:
        manifest = parse(text)
    except ManifestError as error:
        message = str(error)
    else:
        message = f": {kind}.x" if manifest.name == "acme" else ""
    assert f": {kind}.x" in message
