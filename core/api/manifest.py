"""What an ``octavo-plugin.toml`` says, as data; and the closed vocabularies that it may use.

The parser is `octavo.core.discovery.manifest`; this module holds only the shapes, so that plugins and tests can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

__all__ = [
    "DTYPES",
    "ENTRY_POINT_GROUPS",
    "FEATURES",
    "LAYER_KINDS",
    "AttentionManifest",
    "Condition",
    "DType",
    "Feature",
    "IntRange",
    "LayerKind",
    "ModelManifest",
    "Numerics",
    "OpsManifest",
    "PlatformManifest",
    "PluginKind",
    "PluginManifest",
    "ProbeResult",
    "ProbedDevice",
    "Reason",
    "Restriction",
    "SimpleManifest",
    "Verdict",
]

Feature = Literal[
    "causal", "non_causal", "gqa", "sliding_window", "soft_cap", "alibi", "sinks", "lse", "mla", "cross", "chunk_context",
    "mixed_batch", "multi_token_decode", "kv_scales", "batch_invariant", "deterministic", "graph_decode", "graph_mixed",
]  # fmt: skip
LayerKind = Literal["full_attention", "sliding_window", "chunked_local", "mla", "recurrent", "cross", "draft"]
DType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"]

FEATURES: frozenset[str] = frozenset(get_args(Feature))
LAYER_KINDS: tuple[str, ...] = get_args(LayerKind)
DTYPES: tuple[str, ...] = get_args(DType)

PluginKind = Literal[
    "platform", "attention", "ops", "executor", "scheduling_policy", "kv_manager", "proposer", "model", "command", "hook"
]
ENTRY_POINT_GROUPS: Mapping[PluginKind, str] = {
    "platform": "octavo.platforms",
    "attention": "octavo.attention_backends",
    "ops": "octavo.ops",
    "executor": "octavo.executors",
    "scheduling_policy": "octavo.scheduling_policies",
    "kv_manager": "octavo.kv_managers",
    "proposer": "octavo.proposers",
    "model": "octavo.models",
    "command": "octavo.commands",
    "hook": "octavo.hooks",
}
"""The manifest table of each kind (``[platform.acme]``) and the entry-point group that carries the same name."""


@dataclass(frozen=True, kw_only=True)
class IntRange:
    """A set of positive integers: the ``values`` listed, or every multiple of ``multiple_of`` up to ``max``.

    An empty ``values`` with no ``multiple_of`` means none, never "any".
    """

    values: tuple[int, ...] = ()
    multiple_of: int | None = None
    max: int | None = None

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int) or number <= 0:
            return False
        if self.multiple_of is None:
            return number in self.values
        return number % self.multiple_of == 0 and (self.max is None or number <= self.max)

    def __str__(self) -> str:
        if self.multiple_of is None:
            return "{" + ", ".join(map(str, self.values)) + "}"
        return f"multiples of {self.multiple_of}" + (f" up to {self.max}" if self.max is not None else "")


@dataclass(frozen=True, kw_only=True)
class Condition:
    """When an ``except``, ``withheld`` or ops entry applies: AND over the fields that are set, OR within one field.

    ``features`` is AND: every feature named must be asked for. ``arch`` is a comparison such as ``"<acme3"``, within the order
    of the platform's ``archs``.
    """

    dtypes: tuple[str, ...] = ()
    kv_dtypes: tuple[str, ...] = ()
    head_sizes: IntRange | None = None
    block_sizes: IntRange | None = None
    features: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    platform: str | None = None
    arch: str | None = None


@dataclass(frozen=True, kw_only=True)
class Restriction:
    """One ``[[attention.NAME.except]]`` or ``[[attention.NAME.withheld]]`` entry."""

    when: Condition
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlatformManifest:
    """``[platform.NAME]``."""

    name: str
    device_type: str
    kind: Literal["accelerator", "host"] = "accelerator"
    archs: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    probe: str | None = None
    auto: bool = True
    attention: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Deviations that widen the oracle's tolerance and are printed on certificates."""

    q_prescaled: bool = False
    soft_cap_approximate: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionManifest:
    """``[attention.NAME]``: what the backend declares; conformance holds it to exactly this.

    ``platforms`` names platforms; ``"*"`` stands for every platform whose arrays are torch tensors.
    """

    name: str
    platforms: tuple[str, ...]
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    head_sizes: IntRange
    block_sizes: IntRange
    kinds: tuple[str, ...] = ("full_attention",)
    features: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    probe: str | None = None
    auto: bool = True
    needs_host_lengths: bool = False
    numerics: Numerics = Numerics()
    excepts: tuple[Restriction, ...] = ()
    withheld: tuple[Restriction, ...] = ()
    api: tuple[int, int] = (1, 0)  # of its [plugin]: a request field that is newer is refused


@dataclass(frozen=True, kw_only=True)
class OpsManifest:
    """``[ops.NAME]``."""

    name: str
    implements: tuple[str, ...]
    platforms: tuple[str, ...]
    when: Condition = Condition()
    requires: tuple[str, ...] = ()
    probe: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelManifest:
    """``[model.NAME]``: which files this architecture answers for."""

    name: str
    architectures: tuple[str, ...] = ()  # ``architectures`` of a config.json, e.g. "LlamaForCausalLM"
    gguf: tuple[str, ...] = ()  # ``general.architecture`` of a GGUF, e.g. "llama"
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SimpleManifest:
    """A table of any other kind: ``[executor.NAME]``, ``[scheduling_policy.NAME]``, ``[command.NAME]``, …"""

    name: str
    kind: PluginKind
    help: str = ""
    requires: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()  # kv_manager: the KV specs it manages


@dataclass(frozen=True, kw_only=True)
class PluginManifest:
    """One ``octavo-plugin.toml``. Table keys are the names that operators type."""

    name: str
    api: tuple[int, int]
    autoload: bool = False
    path: str = ""
    platforms: Mapping[str, PlatformManifest] = field(default_factory=dict)
    attention: Mapping[str, AttentionManifest] = field(default_factory=dict)
    ops: Mapping[str, OpsManifest] = field(default_factory=dict)
    models: Mapping[str, ModelManifest] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, SimpleManifest]] = field(default_factory=dict)  # kind → name → entry


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason for or against a candidate: what was wanted, what is there, and what would help."""

    field: str
    wanted: str
    supported: str
    hint: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: wanted {self.wanted}, supports {self.supported}"
        return f"{text} ({self.hint})" if self.hint else text


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a request is supported; ``reasons`` says why not and is empty exactly when it is."""

    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What a probe found: the devices (empty = unavailable, then ``reason`` says why and ``hint`` what would help)."""

    devices: Sequence[ProbedDevice] = ()
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class ProbedDevice:
    """A device as a probe sees it, without importing an array library."""

    index: int
    name: str
    arch: str | None = None
    total_bytes: int | None = None
    properties: Mapping[str, Any] = field(default_factory=dict)
