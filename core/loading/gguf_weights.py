"""A GGUF's tensors under Hugging Face's names, in Hugging Face's conventions.

* Llama files hold q and k with rows interleaved for a rotation of neighbouring pairs; rows are moved back, quantised or not,
  since blocks run along rows.
* Gemma 3 files hold norm weights with 1 added; it is taken off, so `WeightSource` always gives what Hugging Face stores and the
  model adds the 1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octavo.core.api.errors import BrokenModel
from octavo.core.api.ops import LinearWeight, WeightPart
from octavo.core.config.model_spec import ModelSpec
from octavo.core.loading.gguf_header import GGUFReader, GGUFTensor

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GGUFWeights", "hf_names"]

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(?:weight|bias)$")


def hf_names(names: Mapping[str, GGUFTensor], arch: str) -> dict[str, str]:
    """Hugging Face name → name in the file; names that Octavo doesn't know keep their own."""
    layer = {**_LAYER, **_GEMMA3} if arch == "gemma3" else _LAYER
    return {_hf_name(name, layer): name for name in names}


def _hf_name(name: str, layer: Mapping[str, str]) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in layer:
        return f"model.layers.{match[1]}.{layer[match[2]]}.{kind}"
    return name


class GGUFWeights:
    """`WeightSource` over a mapped GGUF: nothing is copied until a tensor is asked for (see the module's conventions)."""

    def __init__(self, reader: GGUFReader, tensors: Mapping[str, GGUFTensor], spec: ModelSpec, arch: str) -> None:
        self._reader = reader
        self._tensors = tensors
        self._names = hf_names(tensors, arch)
        self._spec = spec
        self._arch = arch
        if spec.tie_word_embeddings:
            self._names["lm_head.weight"] = self._names["model.embed_tokens.weight"]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def linear(self, name: str) -> LinearWeight:
        """A matrix in the file's own format. Raises `BrokenModel` when it is missing or not a matrix."""
        tensor = self._find(name)
        if len(tensor.shape) != 2:
            raise BrokenModel(f"{self._reader.path.name}: {name!r} has shape {list(tensor.shape)}; a matrix is expected")
        return LinearWeight(parts=(self._part(name, tensor),), name=name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the file's float dtype, or dequantised to float32. Raises `BrokenModel` when it is missing."""
        import torch

        from octavo.core.loading.dequantise import dequantise

        tensor = self._find(name)
        part = self._part(name, tensor)
        dense = part.data if part.format == "dense" else dequantise(part, torch.float32)
        dense = dense.view(tensor.shape)
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            return dense.to(torch.float32) - 1.0
        return dense

    def _find(self, name: str) -> GGUFTensor:
        if name not in self._names:
            raise BrokenModel(f"{self._reader.path.name}: tensor {name!r} is missing", hint="fetch the file again")
        return self._tensors[self._names[name]]

    def _part(self, name: str, tensor: GGUFTensor) -> WeightPart:
        """The tensor as rows: uint8 blocks, or floats where the type is one. A vector is one row."""
        import torch

        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        data = torch.frombuffer(self._reader.buffer, dtype=torch.uint8, offset=tensor.offset, count=tensor.nbytes)
        shape = (rows, tensor.shape[-1])
        data = data.view(rows, -1)
        order = self._row_order(name, tensor)
        if order is not None:
            # A bias is one row of floats: its elements are what moves.
            data = data[order] if rows > 1 else data.view(tensor.shape[-1], -1)[order].view(1, -1)
        floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        if tensor.type.name not in floats:
            return WeightPart(format=tensor.type.name, data=data, shape=shape)
        dtype = floats[tensor.type.name]
        if data.data_ptr() % dtype.itemsize:
            data = data.clone()
        return WeightPart(format="dense", data=data.view(dtype), shape=shape)

    def _row_order(self, name: str, tensor: GGUFTensor) -> Tensor | None:
        """Which row of the file each row of Hugging Face's q or k is; None where they are the same.

        In the file, row ``2i + j`` of a head is row ``j·head_dim/2 + i`` of ours.
        """
        import torch

        match = _ROTATED.search(name)
        if self._arch != "llama" or match is None:
            return None
        heads = self._spec.num_heads if match[1] == "q" else self._spec.num_kv_heads
        size = tensor.shape[0] // heads
        return torch.arange(heads * size).view(heads, size // 2, 2).transpose(1, 2).reshape(-1)
