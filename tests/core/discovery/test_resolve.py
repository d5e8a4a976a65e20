"""`resolve`: what platforms propose and reject, and what a resolved configuration holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.api.errors import OctavoError, PluginError, PluginNotFound, PluginUnavailable, SelectionError, UsageError
from octavo.core.api.ops import OPS
from octavo.core.config import EngineConfig
from octavo.core.engine import resolve as resolving
from octavo.core.engine.resolve import resolve

HEAD = """
from octavo.api.platform import ConfigChange, PlatformCapabilities
from octavo.api.manifest import Reason
from octavo.backends.cpu.platform import CpuPlatform

class Platform(CpuPlatform):
"""
MANIFEST = """
[plugin]
name = "acme"
api = "1.0"
[platform.acme]
device_type = "cpu"
auto = false
attention = ["acme-attention"]
[attention.acme-attention]
platforms = ["acme"]
dtypes = ["float32", "bfloat16"]
kv_dtypes = ["float32", "bfloat16", "int8"]
head_sizes = { multiple_of = 8 }
block_sizes = { multiple_of = 16 }
features = ["causal", "gqa", "chunk_context", "mixed_batch", "multi_token_decode"]
"""
ATTENTION = """
from octavo.plugins.attention.reference.backend import ReferenceAttention

class Attention(ReferenceAttention):
    pass
"""


@pytest.fixture
def acme(local_plugins: Any, tiny_llama: Path) -> Any:
    """Install a platform with the body given, and resolve the tiny model on it."""

    def run(body: str, declared: str = "", **options: Any) -> Any:
        points = {
            "octavo.platforms": {"acme": "acme_octavo.platform:Platform"},
            "octavo.attention_backends": {"acme-attention": "acme_octavo.attention:Attention"},
        }
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        files = {"platform.py": HEAD + lines, "attention.py": ATTENTION}
        local_plugins.add("acme-octavo", manifest=MANIFEST + declared, files=files, entry_points=points)
        return resolve(EngineConfig.from_flat(**{"model": str(tiny_llama), "platform": "acme", **options}))

    return run


def proposing(*changes: tuple[str, Any]) -> str:
    listed = ", ".join(f"ConfigChange(path={path!r}, value={value!r}, reason='faster')" for path, value in changes)
    return f"def propose(self, config):\n    return [{listed}]"


def test_every_choice_is_explicit_and_resolving_again_gives_the_same(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = acme("pass")
    config = found.config
    assert config.plugins.platform == "acme"
    assert dict(config.plugins.attention_backend) == {"full_attention": "acme-attention"}
    assert config.model.dtype in ("float32", "bfloat16")
    assert config.cache.kv_cache_dtype == config.model.dtype
    assert (config.cache.block_size, config.model.max_model_len) == (16, 128)
    assert set(config.plugins.op) == set(OPS)
    assert all(group.block_size == 16 for group in found.groups)
    assert resolve(config) is found, "the worker in this process gets the same object"
    monkeypatch.setattr(resolving, "_LAST", None)  # as in another process
    elsewhere = resolve(EngineConfig.from_flat(**config.flat()))
    assert elsewhere is not found
    assert (elsewhere.config, elsewhere.groups) == (config, found.groups)


def test_proposals_fill_what_the_operator_left_open(acme: Any) -> None:
    found = acme(proposing(("cache.block_size", 64), ("scheduler.max_num_seqs", 8)))
    assert (found.config.cache.block_size, found.config.scheduler.max_num_seqs) == (64, 8)
    assert "cache.block_size = 64: faster (platform acme)" in found.choice.report.proposals


def test_what_the_operator_gave_is_kept_with_a_notice(acme: Any) -> None:
    found = acme(proposing(("cache.block_size", 64)), block_size=32)
    assert found.config.cache.block_size == 32
    assert found.choice.report.notices == ("platform acme would set cache.block_size to 64 (faster); yours is kept",)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu_memory_utilization": 0.5}, ("gpu_memory_utilization has no effect on platform acme", "--kv-cache-memory-bytes")),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 10**7}, ("yours is kept",)),
        ({}, ()),
    ],
)
def test_a_share_of_memory_that_a_proposed_size_makes_void_gets_a_notice(acme: Any, options: Any, says: Any) -> None:
    notices = acme(proposing(("cache.kv_cache_memory_bytes", 10**6)), **options).choice.report.notices
    assert len(notices) == bool(says)
    assert all(text in notices[0] for text in says)


def test_a_proposal_that_touches_an_earlier_step_runs_it_again(acme: Any) -> None:
    body = """
def propose(self, config):
    if config.model.dtype == "bfloat16":
        return [ConfigChange(path="model.dtype", value="float32", reason="exact")]
    assert config.model.dtype == "float32", "asked again on what it proposed"
    return [ConfigChange(path="cache.block_size", value=32, reason="exact needs it")]
"""
    found = acme("capabilities = PlatformCapabilities(dtypes=('bfloat16', 'float32'))\ndef __init__(self): pass" + body)
    assert (found.config.model.dtype, found.config.cache.block_size) == ("float32", 32)
    assert {group.spec.dtype for group in found.groups} == {"float32"}


def test_a_kv_dtype_that_is_proposed_reaches_the_backends(acme: Any) -> None:
    found = acme(proposing(("cache.kv_cache_dtype", "int8")))
    assert {group.spec.kv_dtype for group in found.groups} == {"int8"}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "n = 0\ndef propose(self, config):\n    self.n += 1\n"
            "    return [ConfigChange(path='scheduler.max_num_seqs', value=self.n, reason='more')]",
            "platform 'acme' still proposes changes after 4 rounds",
        ),
        (proposing(("cache.blocksize", 4)), "platform 'acme' proposes cache.blocksize = 4: no configuration field"),
        (
            proposing(("cache.block_size", "big")),
            "'acme' proposes cache.block_size = 'big': block_size must be a whole",
        ),
        (
            "def propose(self, config):\n    raise OSError('no driver')",
            "platform 'acme' failed in propose(): OSError: no driver",
        ),
        ("def devices(self):\n    raise OSError('no driver')", "platform 'acme' failed in devices(): OSError: no driver"),
        ("def __init__(self):\n    raise OSError('no driver')", "is failed-to-load: OSError: no driver"),
        ("def reject(self, config):\n    return 1 / 0", "platform 'acme' failed in reject(): ZeroDivisionError"),
    ],
)
def test_a_platform_that_misbehaves_is_named(acme: Any, body: str, says: str) -> None:
    with pytest.raises((PluginError, PluginUnavailable)) as caught:
        acme(body)
    assert says in str(caught.value)


def test_a_proposal_that_no_backend_allows_is_refused_with_who_allows_what(acme: Any) -> None:
    with pytest.raises(SelectionError, match="block_size: wanted 24, supports multiples of 16"):
        acme(proposing(("cache.block_size", 24)))


def test_the_platform_has_the_last_word(acme: Any) -> None:
    body = """
def reject(self, config):
    assert config.cache.block_size and config.plugins.attention_backend
    return [Reason(field="max_model_len", wanted=str(config.model.max_model_len), supported="at most 64")]
"""
    with pytest.raises(SelectionError) as caught:
        acme(body)
    assert str(caught.value) == "platform 'acme' can't run this: max_model_len: wanted 128, supports at most 64"
    assert caught.value.report is not None


def test_dtypes_are_the_platform_s(acme: Any) -> None:
    body = "def __init__(self):\n    self.capabilities = PlatformCapabilities(dtypes=('bfloat16',))"
    assert acme(body).config.model.dtype == "bfloat16"


def test_whether_steps_are_planned_ahead_is_left_to_the_executor_where_the_platform_allows_it(acme: Any) -> None:
    assert acme("pass").config.scheduler.async_scheduling is None


def test_a_platform_of_one_step_at_a_time_turns_asynchronous_scheduling_off(acme: Any) -> None:
    body = "def __init__(self):\n    self.capabilities = PlatformCapabilities(async_scheduling=False)"
    assert acme(body).config.scheduler.async_scheduling is False


def test_asking_such_a_platform_for_asynchronous_scheduling_is_refused(acme: Any) -> None:
    body = "def __init__(self):\n    self.capabilities = PlatformCapabilities(async_scheduling=False)"
    with pytest.raises(SelectionError, match=r"'acme' runs one step at a time.*; leave async_scheduling out"):
        acme(body, async_scheduling=True)


EXACT = "needs_host_lengths = true\n"


def test_a_backend_that_needs_host_lengths_gets_no_step_planned_over_one_with_guesses(
    acme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = acme("pass", EXACT, speculative="ngram")
    assert found.config.scheduler.async_scheduling is False
    assert found.choice.report.notices == (
        "async_scheduling turned off: acme-attention needs exact lengths on the host, and speculative=ngram leaves them open",
    )
    monkeypatch.setattr(resolving, "_LAST", None)  # as in another process
    again = resolve(EngineConfig.from_flat(**found.config.flat()))
    assert again.config == found.config
    assert again.choice.report.notices == ()


def test_planning_over_guesses_is_refused_where_a_backend_needs_host_lengths(acme: Any) -> None:
    with pytest.raises(SelectionError, match=r"acme-attention needs exact lengths on the host.*; leave async_scheduling out"):
        acme("pass", EXACT, speculative="ngram", async_scheduling=True)


@pytest.mark.parametrize(
    ("declared", "options"),
    [("", {"speculative": "ngram"}), (EXACT, {}), (EXACT, {"async_scheduling": True})],
    ids=["not needed", "no guesses", "no guesses, asked for"],
)
def test_steps_overlap_where_the_host_knows_the_lengths_or_need_not(acme: Any, declared: str, options: dict[str, Any]) -> None:
    found = acme("pass", declared, **options)
    assert found.config.scheduler.async_scheduling is options.get("async_scheduling")
    assert not found.choice.report.notices


def test_a_cache_of_8_bits_without_scales_is_warned_of(acme: Any) -> None:
    found = acme("pass", kv_cache_dtype="int8")
    (notice,) = found.choice.report.notices
    assert notice == (
        "kv_cache_dtype int8: the model has no scales for K and V, which are rounded to whole numbers: answers may be wrong"
    )


def test_a_dtype_that_the_platform_lacks_is_refused_with_those_it_has(acme: Any) -> None:
    body = "def __init__(self):\n    self.capabilities = PlatformCapabilities(dtypes=('bfloat16',))"
    with pytest.raises(SelectionError, match=r"'acme' has no float32 activations on device 0 .*; --dtype bfloat16"):
        acme(body, dtype="float32")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"device": 5}, UsageError, "platform 'acme' has no device 5; it has: 0"),
        ({"max_model_len": 129}, UsageError, "max_model_len 129 exceeds the model's own 128; --max-model-len 128 or less"),
        ({"executor": "inlin"}, PluginNotFound, "no executor named 'inlin'; did you mean 'inline'"),
        ({"scheduling_policy": "fcsf"}, PluginNotFound, "no scheduling policy named 'fcsf'; did you mean 'fcfs'"),
        ({"speculative": "ngrams"}, PluginNotFound, "no proposer named 'ngrams'; did you mean 'ngram'"),
        ({"plugin": "nothing"}, PluginNotFound, "no hook named 'nothing'"),
        ({"op": "rms_norm=nobody"}, PluginNotFound, "no ops plugin named 'nobody'"),
        ({"attention_backend": "acme"}, PluginNotFound, "no attention backend named 'acme'; did you mean 'acme-attention'"),
        ({"platform": "acmee"}, PluginNotFound, "no platform named 'acmee'; did you mean 'acme'"),
        ({"model": ""}, UsageError, "no model is given; --model NAME"),
    ],
)
def test_what_is_asked_wrongly_is_refused_with_advice(
    acme: Any, options: dict[str, Any], error: type[OctavoError], says: str
) -> None:
    with pytest.raises(error) as caught:
        acme("pass", **options)
    assert says in str(caught.value)


def test_the_context_may_be_shortened(acme: Any) -> None:
    assert acme("pass", max_model_len=64).config.model.max_model_len == 64
