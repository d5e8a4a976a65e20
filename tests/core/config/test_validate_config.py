from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo.core.api.errors import UsageError
from octavo.core.config import EngineConfig, environment
from octavo.core.config.file import read_config_file


def flat(**options: Any) -> EngineConfig:
    return EngineConfig.from_flat(**options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512M", 512_000_000), ("2GiB", 2**31), ("1.5g", 1_500_000_000), (" 4 KiB ", 4096), ("1T", 10**12), ("77", 77), (99, 99)],
)
def test_memory_sizes_are_read_with_their_units(text: Any, expected: int) -> None:
    assert flat(kv_cache_memory_bytes=text).cache.kv_cache_memory_bytes == expected


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("triton", {"*": "triton"}),
        ("", {}),
        ("auto", {}),
        (None, {}),
        ("full_attention=a, draft=b", {"full_attention": "a", "draft": "b"}),
        ({"*": "a"}, {"*": "a"}),
        ({"full_attention.2": "a"}, {"full_attention.2": "a"}),
    ],
)
def test_attention_backends_have_one_canonical_form(given: Any, canonical: dict[str, str]) -> None:
    config = flat(attention_backend=given)
    assert dict(config.plugins.attention_backend) == canonical
    assert flat(attention_backend=config.plugins.attention_backend).plugins == config.plugins


@pytest.mark.parametrize("given", ["rms_norm=a,rotary=b", ("rms_norm=a", "rotary=b"), {"rms_norm": "a", "rotary": "b"}])
def test_ops_have_one_canonical_form(given: Any) -> None:
    assert dict(flat(op=given).plugins.op) == {"rms_norm": "a", "rotary": "b"}


@pytest.mark.parametrize("given", ["a,b", ["a", "b"], ("a", "b")])
def test_plugins_have_one_canonical_form(given: Any) -> None:
    assert flat(plugin=given).plugins.plugin == ("a", "b")


def test_short_dtype_names_and_paths_are_understood(tmp_path: Path) -> None:
    config = flat(dtype="bf16", kv_cache_dtype="fp8", model=tmp_path)
    assert (config.model.dtype, config.cache.kv_cache_dtype, config.model.model) == ("bfloat16", "fp8_e4m3", str(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"block_sise": 16}, "unknown option 'block_sise'; did you mean 'block_size'"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"block_size": "16"}, "block_size must be a whole number, not '16'"),
        ({"block_size": True}, "block_size must be a whole number, not True"),
        ({"num_blocks": 1}, "num_blocks must be at least 2"),
        ({"num_blocks": 2**31}, "num_blocks must be at most 2147483647, not 2147483648"),
        ({"block_size": 10**30}, "block_size must be at most 2147483647"),
        ({"max_num_batched_tokens": 2**31}, "max_num_batched_tokens must be at most 2147483647"),
        ({"max_model_len": 2**40}, "max_model_len must be at most 2147483647"),
        ({"platform": ""}, "platform must name a platform plugin, not ''"),
        ({"kv_cache_memory_bytes": "lots"}, "must be a number of bytes, not 'lots'; write 4000000000, 512M or 2GiB"),
        ({"kv_cache_memory_bytes": "-5M"}, "must be a number of bytes"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes must be at least 1"),
        ({"gpu_memory_utilization": 1.5}, "must be above 0 and at most 1, not 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "must be a number, not nan"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, not 1"),
        ({"dtype": "float8"}, "dtype must be one of auto, float32, float16, bfloat16, not 'float8'; did you mean"),
        ({"dtype": 16}, "dtype must be text"),
        ({"prefix_hash": "md5"}, "prefix_hash must be one of sha256, xxh3"),
        ({"seed": 2**64}, "seed must fit in 64 bits"),
        ({"device": -1}, "device must be at least 0"),
        ({"max_num_seqs": 10**9}, "max_num_seqs must be at most 65536"),
        ({"attention_backend": "fullattention=a"}, "'fullattention' isn't a kind of layer; did you mean 'full_attention'"),
        ({"attention_backend": "draft="}, "attention_backend must be NAME, or kind=NAME,kind=NAME, not 'draft='"),
        ({"attention_backend": "draft=a,draft=b"}, "names one key twice"),
        ({"attention_backend": 7}, "attention_backend must be a mapping of names to names"),
        ({"attention_backend": {"draft": 7}}, "attention_backend must be a mapping of names to names"),
        ({"op": "rms_nrm=a"}, "'rms_nrm' isn't an op; did you mean 'rms_norm'"),
        ({"op": "rms_norm"}, "op must be OP=NAME, not 'rms_norm'"),
        ({"plugin": [1]}, "plugin must be a list of names"),
        ({"executor": None}, "executor must be text, not None"),
    ],
)
def test_each_mistake_is_one_line_that_says_what_to_do(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        flat(**options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_operator_gave_is_remembered_even_at_its_default() -> None:
    config = flat(enable_prefix_caching=True)
    assert config.given == {"enable_prefix_caching"}
    assert config == EngineConfig(), "it doesn't make another configuration"
    assert config.with_value("cache.block_size", 32).given == {"enable_prefix_caching"}


def test_a_configuration_survives_being_made_flat() -> None:
    config = flat(model="m", attention_backend="a", op="rms_norm=x", plugin="p", kv_cache_memory_bytes="1G", block_size=32)
    assert flat(**config.flat()) == config


class TestConfigFile:
    def read(self, tmp_path: Path, text: str) -> dict[str, Any]:
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return read_config_file(path)

    def test_flat_keys_and_tables_say_the_same(self, tmp_path: Path) -> None:
        one = self.read(tmp_path, 'model = "m"\nblock-size = 32\nattention_backend = "a"')
        other = self.read(tmp_path, '[model]\nmodel = "m"\n[cache]\nblock_size = 32\n[plugins]\nattention_backend = "a"')
        assert one == other == {"model": "m", "block_size": 32, "attention_backend": "a"}

    def test_tables_for_kinds_and_ops(self, tmp_path: Path) -> None:
        config = flat(**self.read(tmp_path, '[attention_backend]\nfull_attention = "a"\n[plugins.op]\nrms_norm = "x"'))
        assert dict(config.plugins.attention_backend) == {"full_attention": "a"}
        assert dict(config.plugins.op) == {"rms_norm": "x"}

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("block_sise = 1", "unknown option 'block_sise'; did you mean 'block_size'"),
            ("[cache]\nmax_num_seqs = 1", "max_num_seqs belongs in [scheduler], not [cache]"),
            ("block_size = 1\n[cache]\nblock_size = 1", "block_size is set twice"),
            ("block_size = ", "isn't TOML"),
        ],
    )
    def test_mistakes_name_the_file(self, tmp_path: Path, text: str, says: str) -> None:
        with pytest.raises(UsageError) as caught:
            self.read(tmp_path, text)
        assert says in str(caught.value)
        assert "octavo.toml" in str(caught.value)

    def test_a_missing_file_is_said_to_be_missing(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="can't be read: No such file"):
            read_config_file(tmp_path / "nothing.toml")


class TestEnvironment:
    def test_an_unknown_variable_gets_the_nearest_name(self) -> None:
        (line,) = environment.unknown({"OCTAVO_CACHEDIR": "/x", "OCTAVO_DEBUG": "1", "HOME": "/"})
        assert line.startswith("environment variable OCTAVO_CACHEDIR is unknown and ignored; did you mean 'OCTAVO_CACHE_DIR'")

    def test_values_are_read_and_checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCTAVO_CACHE_DIR", "~/models")
        monkeypatch.setenv("OCTAVO_PROBE_TIMEOUT_S", "0.5")
        monkeypatch.setenv("OCTAVO_DEBUG", "1")
        assert environment.cache_dir() == Path.home() / "models"
        assert environment.probe_timeout_s() == 0.5
        assert environment.debug()
        for bad in ("soon", "0", "-1", "nan", "inf"):
            monkeypatch.setenv("OCTAVO_PROBE_TIMEOUT_S", bad)
            with pytest.raises(UsageError, match="OCTAVO_PROBE_TIMEOUT_S must be a number above 0"):
                environment.probe_timeout_s()

    def test_defaults_hold_where_nothing_is_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in environment.VARIABLES:
            monkeypatch.delenv(name, raising=False)
        assert environment.cache_dir() == Path.home() / ".cache/octavo/models"
        assert not environment.debug()
        assert environment.log_level() == "warning"

    def test_no_other_file_reads_the_environment(self) -> None:
        core = Path(environment.__file__).resolve().parents[1]
        reading = re.compile(r"""(environ(\.get)?|getenv)[\[(]\s*["']OCTAVO_""")
        readers = [path.relative_to(core) for path in core.rglob("*.py") if reading.search(path.read_text(encoding="utf-8"))]
        assert readers == []
