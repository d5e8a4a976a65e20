"""Whether a file's tensors fit its own configuration: checked from the headers, before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from octavo.core.api.errors import BrokenModel
from octavo.core.config.model_spec import ModelSpec

__all__ = ["CHECKED", "check_shapes"]

CHECKED = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
    }
)
"""The architectures that core ships. Others may fuse, factor or rename any tensor; what theirs must be, their plugin checks."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def check_shapes(spec: ModelSpec, shapes: Mapping[str, Sequence[int]], *, where: str) -> None:
    """Compare ``shapes`` (Hugging Face name → shape) with ``spec``.

    Tensors under the names that the `CHECKED` architectures share must have the shape that the configuration implies, and those
    without which none of them runs must be there; nothing is asked of other architectures. Raises `BrokenModel`.
    """
    if spec.architecture not in CHECKED:
        return
    for name, shape in _expected(spec):
        found = shapes.get(name)
        if found is None and _required(name, spec):
            raise BrokenModel(f"{where}: tensor {name!r} is missing", hint="the file is incomplete: fetch it again")
        if found is not None and tuple(found) != shape:
            raise BrokenModel(f"{where}: {name!r} has shape {list(found)}; the configuration implies {list(shape)}")
    beyond = [match[1] for name in shapes if (match := _LAYER.match(name)) and int(match[1]) >= spec.num_layers]
    if beyond:
        raise BrokenModel(f"{where}: has tensors of layer {beyond[0]}; the configuration says {spec.num_layers} layers")


def _required(name: str, spec: ModelSpec) -> bool:
    """The architectures differ in norms, biases and feed-forward parts; these they all have."""
    if name == "lm_head.weight":
        return not spec.tie_word_embeddings
    return name.startswith(("model.embed", "model.norm")) or re.search(r"\.self_attn\.[qkvo]_proj\.weight$", name) is not None


def _expected(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (spec.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_proj.bias": (q_size,),
        "self_attn.k_proj.bias": (kv_size,),
        "self_attn.v_proj.bias": (kv_size,),
        "self_attn.o_proj.bias": (hidden,),
        "self_attn.q_norm.weight": (spec.head_dim,),
        "self_attn.k_norm.weight": (spec.head_dim,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    for index in range(spec.num_layers):
        for suffix, shape in layer.items():
            yield f"model.layers.{index}.{suffix}", shape
