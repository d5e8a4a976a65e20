"""The tensors of one or several safetensors files under the names of a text model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from octavo.core.api.errors import BrokenModel, UnsupportedModel
from octavo.core.api.ops import LinearWeight, WeightPart
from octavo.core.config.model_spec import ModelSpec
from octavo.core.loading.files import is_there
from octavo.core.loading.hf_config import read_json
from octavo.core.loading.safetensors_header import SafeTensor, SafetensorsFile

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SafetensorsWeights", "TensorMap", "open_tensors"]

_FLOATS: Mapping[str, str] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PREFIXES: Mapping[str, str] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
"""How checkpoints that also see images call their text model's tensors."""

TensorMap = Mapping[str, tuple[SafetensorsFile, SafeTensor]]


def open_tensors(folder: Path) -> TensorMap:
    """Every tensor of the folder's safetensors files, by the text model's names; headers checked, nothing read.

    Raises `BrokenModel`, and `UnsupportedModel` for a folder that holds pickled weights only.
    """
    found: dict[str, tuple[SafetensorsFile, SafeTensor]] = {}
    for file, names in _files(folder):
        for name in file.tensors if names is None else names:
            if name not in file.tensors:
                raise BrokenModel(
                    f"{file.path.name}: tensor {name!r} is missing", hint="the folder is incomplete: fetch it again"
                )
            ours = _text_name(name)
            if ours in found:
                raise BrokenModel(f"{folder.name}: tensor {ours!r} is there twice")
            found[ours] = (file, file.tensors[name])
    if "embed_tokens.weight" in found:  # saved without its head
        return {f"model.{name}": place for name, place in found.items()}
    return found


def _files(folder: Path) -> Iterable[tuple[SafetensorsFile, list[str] | None]]:
    """The files, each with the tensors that an index gives it (None: all)."""
    if is_there(folder / _SINGLE):
        return [(SafetensorsFile(folder / _SINGLE), None)]
    if is_there(folder / _INDEX):
        return [(SafetensorsFile(folder / name), tensors) for name, tensors in _weight_map(folder).items()]
    others = sorted(path for path in folder.glob("*.safetensors") if is_there(path))
    if len(others) == 1:
        return [(SafetensorsFile(others[0]), None)]
    if others:
        raise BrokenModel(f"{folder} has {len(others)} safetensors files but no {_INDEX}", hint="fetch the folder again")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"{folder} holds pickled weights ({pickles[0]}), which can run code when they are read",
            hint='convert them where you trust them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('{folder}', safe_serialization=True)\"",
        )
    raise BrokenModel(f"{folder} has no weights: no *.safetensors", hint="fetch the folder again")


def _weight_map(folder: Path) -> dict[str, list[str]]:
    """File name → its tensors. Names are looked up in the folder only: one that would lead out of it is refused."""
    listed = read_json(folder / _INDEX, most_bytes=32 << 20).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise BrokenModel(f"{_INDEX} has no 'weight_map'", hint="fetch the file again")
    files: dict[str, list[str]] = {}
    for tensor, name in listed.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or _leaves_folder(name):
            raise BrokenModel(f"{_INDEX} places {tensor[:60]!r} in {str(name)[:60]!r}, which is no safetensors file beside it")
        files.setdefault(name, []).append(tensor)
    missing = [name for name in files if not is_there(folder / name)]
    if missing:
        raise BrokenModel(f"{folder} lacks {missing[0]} ({len(missing)} of {len(files)} files)", hint="fetch the folder again")
    return files


def _leaves_folder(name: str) -> bool:
    return "\\" in name or "\0" in name or ":" in name or PurePosixPath(name).name != name


def _text_name(name: str) -> str:
    for prefix, ours in _PREFIXES.items():
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name


class SafetensorsWeights:
    """`WeightSource` over mapped files: tensors are views of the mapping, so memory holds no second copy."""

    def __init__(self, tensors: TensorMap, spec: ModelSpec) -> None:
        self._tensors = dict(tensors)
        if spec.tie_word_embeddings and "model.embed_tokens.weight" in tensors:
            self._tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def linear(self, name: str) -> LinearWeight:
        """A matrix, as it lies in the file. Raises `BrokenModel` when it is missing or not a matrix."""
        data = self.tensor(name)
        if data.dim() != 2:
            raise BrokenModel(f"tensor {name!r} has shape {list(data.shape)}; a matrix is expected")
        part = WeightPart(format="dense", data=data, shape=(data.shape[0], data.shape[1]))
        return LinearWeight(parts=(part,), name=name)

    def tensor(self, name: str) -> Tensor:
        """A tensor in the file's float dtype. Raises `BrokenModel` when it is missing, `UnsupportedModel` for other dtypes."""
        import torch

        if name not in self._tensors:
            raise BrokenModel(f"tensor {name!r} is missing", hint="the folder is incomplete: fetch it again")
        file, tensor = self._tensors[name]
        if tensor.dtype not in _FLOATS:
            raise UnsupportedModel(
                f"{file.path.name}: {name!r} has dtype {tensor.dtype}", hint=f"Octavo reads {', '.join(_FLOATS)}"
            )
        dtype: torch.dtype = getattr(torch, _FLOATS[tensor.dtype])
        if not tensor.nbytes:
            return torch.empty(tensor.shape, dtype=dtype)
        data = torch.frombuffer(file.buffer, dtype=torch.uint8, offset=tensor.offset, count=tensor.nbytes)
        if data.data_ptr() % dtype.itemsize:  # old writers don't align
            data = data.clone()
        return data.view(dtype).view(tensor.shape)
