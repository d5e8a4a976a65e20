"""Files that lie. Nothing crashes, hangs or allocates what a header claims; the answer is one line and a typed error."""

from __future__ import annotations

import json
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from octavo.core.api.errors import BrokenModel, ModelError, UnsupportedModel, UsageError
from octavo.core.api.manifest import ModelManifest
from octavo.core.loading import ModelSource, open_model
from octavo.core.loading.dequantise import dequantise_weight
from octavo.core.loading.gguf_header import GGUFReader
from octavo.core.loading.safetensors_header import SafetensorsFile

NUM_MUTANTS = 2000
LIMIT_S = 5.0  # for one file, on a busy machine; milliseconds are usual
SLACK_BYTES = 512 << 10  # objects of the interpreter, whatever the file says
INTERESTING = [0, 1, 31, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@contextmanager
def watched(file_bytes: int) -> Iterator[None]:
    """No more than the file's own size, and a little, may be allocated; and it must be quick."""
    tracemalloc.start()
    start = time.monotonic()
    try:
        yield
    finally:
        seconds = time.monotonic() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= file_bytes + SLACK_BYTES, f"{peak} bytes for a file of {file_bytes}"
    assert seconds < LIMIT_S


def mutated(original: bytes, rng: random.Random, header_bytes: int) -> bytes:
    """The file with a few wounds, most of them in its header."""
    data = bytearray(original)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 8])):
        place = rng.randrange(min(header_bytes, len(data)) if rng.random() < 0.9 else len(data)) if data else 0
        kind = rng.randrange(7)
        if kind == 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            data[place : place + 8] = struct.pack("<Q", rng.choice(INTERESTING))
        elif kind == 2:
            data[place : place + 4] = struct.pack("<I", rng.choice(INTERESTING) & 0xFFFFFFFF)
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            del data[place : place + rng.randrange(1, 64)]
        elif kind == 5:
            data[place:place] = rng.randbytes(rng.randrange(1, 64))
        else:
            other = rng.randrange(len(data)) if data else 0
            data[place : place + 32] = data[other : other + 32]
    return bytes(data)


def use_everything(source: ModelSource) -> None:
    """What opened must also be readable to the end: every weight, the tokenizer, the sampling defaults."""
    weights = source.weights()
    for layer in range(source.spec.num_layers):
        for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{part}.weight"
            if name in weights:
                dequantise_weight(weights.linear(name), torch.float32)
    weights.tensor("model.norm.weight")
    tokenizer = source.tokenizer()
    assert source.generation is not None
    tokenizer.decode([index for index in tokenizer.encode("hello 123") if index < tokenizer.vocab_size])


def survive(path: Path, models: Mapping[str, ModelManifest]) -> type[BaseException] | None:
    """Opens and uses the model; any refusal must be ours and one line long."""
    try:
        with watched(path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.iterdir())):
            source = open_model(path, models=models)
        use_everything(source)
    except (ModelError, UsageError) as error:
        refusal = error
    else:
        return None
    assert "\n" not in str(refusal)
    return type(refusal)


def gguf_originals(make_gguf: Callable[..., Path], folder: Path) -> list[bytes]:
    """A byte-level BPE Llama with quantised parts, and a Gemma with a SentencePiece vocabulary."""
    rng = np.random.default_rng(0)
    quantised = {}
    for name, kind in (("ffn_up", "Q4_0"), ("ffn_gate", "Q8_0"), ("attn_q", "Q4_1"), ("attn_k", "Q5_0"), ("attn_v", "Q5_1")):
        rows = {"attn_q": 32, "attn_k": 16, "attn_v": 16}.get(name, 64)
        number = gguf.GGMLQuantizationType[kind]
        quantised[f"blk.0.{name}.weight"] = (gguf.quantize(rng.standard_normal((rows, 32)).astype(np.float32), number), number)
    pieces = ["<unk>", "<bos>", "<eos>", "▁", "▁h", "e", "l", "lo", "▁he", *(f"<0x{byte:02X}>" for byte in range(23))]
    spm = {
        "gemma3.attention.sliding_window": 16,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [-float(index) for index in range(32)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 6, *[6] * 23],
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    return [
        make_gguf(folder / "llama.gguf", tensors=quantised).read_bytes(),
        make_gguf(folder / "gemma.gguf", arch="gemma3", metadata=spm).read_bytes(),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_mutated_ggufs_are_refused_or_read(
    tmp_path: Path, make_gguf: Callable[..., Path], models: Mapping[str, ModelManifest], which: int
) -> None:
    original = gguf_originals(make_gguf, tmp_path)[which]
    header_bytes = min(tensor.offset for tensor in _tensors(original, tmp_path))
    path = tmp_path / "mutant.gguf"
    answers = []
    for seed in range(NUM_MUTANTS // 2):
        path.write_bytes(mutated(original, random.Random(seed), header_bytes))
        answers.append(survive(path, models))
    # The mutations reach deep enough: some files stay whole, most break, some name what isn't supported.
    assert answers.count(BrokenModel) > NUM_MUTANTS // 8
    assert answers.count(None) > 10
    assert answers.count(UnsupportedModel) > 0


def _tensors(original: bytes, folder: Path) -> list[Any]:
    path = folder / "original.gguf"
    path.write_bytes(original)
    return list(GGUFReader(path).read_tensors().values())


def test_mutated_safetensors_are_refused_or_read(
    tmp_path: Path, make_folder: Callable[..., Path], models: Mapping[str, ModelManifest]
) -> None:
    folder = make_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    original = path.read_bytes()
    header_bytes = 8 + struct.unpack_from("<Q", original)[0]
    answers = []
    for seed in range(NUM_MUTANTS):
        path.write_bytes(mutated(original, random.Random(seed), header_bytes))
        answers.append(survive(folder, models))
    assert answers.count(BrokenModel) > NUM_MUTANTS // 2
    assert answers.count(None) > 10


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_mutated_json_beside_the_weights_is_refused_or_read(
    tmp_path: Path, make_folder: Callable[..., Path], models: Mapping[str, ModelManifest], name: str
) -> None:
    files = {
        "generation_config.json": {"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20, "top_p": 0.8},
        "tokenizer_config.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"},
    }
    folder = make_folder(tmp_path / "model", files=files)
    original = (folder / name).read_bytes()
    for seed in range(250):
        (folder / name).write_bytes(mutated(original, random.Random(seed), len(original)))
        survive(folder, models)


def test_random_bytes_named_gguf_are_refused(tmp_path: Path, models: Mapping[str, ModelManifest]) -> None:
    path = tmp_path / "noise.gguf"
    for seed in range(50):
        path.write_bytes(random.Random(seed).randbytes(4096))
        with pytest.raises(BrokenModel, match="doesn't start with 'GGUF'; fetch the file again"):
            open_model(path, models=models)


def test_every_truncation_of_a_gguf_is_refused(
    tmp_path: Path, make_gguf: Callable[..., Path], models: Mapping[str, ModelManifest]
) -> None:
    original = make_gguf(tmp_path / "whole.gguf").read_bytes()
    end = max(tensor.offset + tensor.nbytes for tensor in _tensors(original, tmp_path))  # the writer pads beyond it
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 3000, 61), *range(3000, end, 4999), end - 1]:
        path.write_bytes(original[:length])
        with pytest.raises(BrokenModel, match=r"truncated|past the end|claims|bytes"):
            open_model(path, models=models)


def test_every_truncation_of_safetensors_is_refused(
    tmp_path: Path, make_folder: Callable[..., Path], models: Mapping[str, ModelManifest]
) -> None:
    folder = make_folder(tmp_path / "model")
    path = folder / "model.safetensors"
    original = path.read_bytes()
    for length in [*range(0, 3000, 61), *range(3000, len(original), 4999), len(original) - 1]:
        path.write_bytes(original[:length])
        with pytest.raises(BrokenModel):
            open_model(folder, models=models)


# GGUF headers by hand: (number of tensors, number of keys, what follows).


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int, keys: int, rest: bytes = b"", *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ARCH = pair(b"general.architecture", 8, text(b"llama"))
GIGANTIC = {
    "keys": header(0, 2**63, b"\0" * 64),
    "tensors": header(2**63, 1, ARCH + b"\0" * 64),
    "a key's length": header(0, 1, struct.pack("<Q", 2**63) + b"\0" * 64),
    "a string's length": header(0, 1, text(b"k") + struct.pack("<IQ", 8, 2**40) + b"\0" * 64),
    "an array of numbers": header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 10, 2**61) + b"\0" * 64),
    "an array of strings": header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + b"\0" * 64),
    "a string in an array": header(0, 1, text(b"k") + struct.pack("<IIQQ", 9, 8, 2, 2**62) + b"\0" * 64),
    "a dimension": header(1, 1, ARCH + tensor(b"t", (2**62,), 0, 0) + b"\0" * 256),
    "dimensions that overflow": header(1, 1, ARCH + tensor(b"t", (2**32, 2**32), 0, 0) + b"\0" * 256),
    "many dimensions": header(1, 1, ARCH + text(b"t") + struct.pack("<I", 2**31) + b"\0" * 256),
    "an offset": header(1, 1, ARCH + tensor(b"t", (8,), 0, 2**63) + b"\0" * 256),
    "an offset that wraps": header(1, 1, ARCH + tensor(b"t", (8,), 0, 2**64 - 32) + b"\0" * 256),
    "an alignment": header(1, 2, ARCH + pair(b"general.alignment", 4, struct.pack("<I", 2**31)) + tensor(b"t", (8,), 0, 0)),
}
WRONG = {
    "a key twice": header(0, 2, ARCH + ARCH),
    "a key that is not UTF-8": header(0, 1, pair(b"\xff\xfe", 4, b"\0" * 4)),
    "a value of no known type": header(0, 1, pair(b"k", 77, b"\0" * 8)),
    "an array of arrays": header(0, 1, pair(b"k", 9, struct.pack("<IQ", 9, 4) + b"\0" * 64)),
    "a tensor twice": header(2, 1, ARCH + tensor(b"t", (8,), 0, 0) + tensor(b"t", (8,), 0, 32) + b"\0" * 256),
    "tensors on top of each other": header(2, 1, ARCH + tensor(b"t", (64,), 0, 0) + tensor(b"u", (8,), 0, 32) + b"\0" * 512),
    "an offset that is not aligned": header(1, 1, ARCH + tensor(b"t", (8,), 0, 4) + b"\0" * 256),
    "no dimension": header(1, 1, ARCH + tensor(b"t", (), 0, 0) + b"\0" * 256),
    "five dimensions": header(1, 1, ARCH + tensor(b"t", (1, 1, 1, 1, 1), 0, 0) + b"\0" * 256),
    "an empty dimension": header(1, 1, ARCH + tensor(b"t", (8, 0), 0, 0) + b"\0" * 256),
    "a row that is no whole number of blocks": header(1, 1, ARCH + tensor(b"t", (33,), 2, 0) + b"\0" * 256),
    "a tensor of no known type": header(1, 1, ARCH + tensor(b"t", (32,), 4000, 0) + b"\0" * 256),
    "an alignment that is no power of two": header(
        1, 2, ARCH + pair(b"general.alignment", 4, struct.pack("<I", 24)) + tensor(b"t", (8,), 0, 0) + b"\0" * 256
    ),
}


@pytest.mark.parametrize("claim", GIGANTIC)
def test_a_gguf_that_claims_gigantic_things_is_refused_before_they_are_made(
    tmp_path: Path, models: Mapping[str, ModelManifest], claim: str
) -> None:
    path = tmp_path / "huge.gguf"
    path.write_bytes(GIGANTIC[claim])
    with watched(path.stat().st_size), pytest.raises(BrokenModel) as caught:
        GGUFReader(path).read_tensors()
    assert "huge.gguf" in str(caught.value)


@pytest.mark.parametrize("fault", WRONG)
def test_a_gguf_with_a_fault_is_refused(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(WRONG[fault])
    with pytest.raises(BrokenModel, match=r"wrong\.gguf: .*; fetch the file again"):
        GGUFReader(path).read_tensors()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(0, 0, version=1), "GGUF version 1; Octavo reads 2 and 3"),
        (header(0, 0, version=3 << 24), "big-endian"),
        (header(1, 1, ARCH + tensor(b"t", (256,), 10, 0) + b"\0" * 256), "'t' .* has type Q2_K; Octavo reads F32.*Q4_K"),
    ],
)
def test_a_gguf_of_another_kind_is_unsupported(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=message):
        GGUFReader(path).read_tensors()


def test_version_2_is_read_like_version_3(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    data = header(1, 1, ARCH + tensor(b"t", (4, 2), 0, 0), version=2)
    path.write_bytes(data + b"\0" * (-len(data) % 32) + np.arange(8, dtype=np.float32).tobytes())
    reader = GGUFReader(path)
    found = reader.read_tensors()["t"]
    assert (reader.metadata, found.shape, found.nbytes) == ({"general.architecture": "llama"}, (2, 4), 32)


def test_every_metadata_type_reads_as_the_gguf_package_wrote_it(
    tmp_path: Path, make_gguf: Callable[..., Path], typed: Any
) -> None:
    numbers = {
        "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 1.5, "float64": 1e300, "bool": True, "string": "ünï",
    }  # fmt: skip
    extra = {f"x.{kind}": typed(f"add_{kind}", value) for kind, value in numbers.items()}
    extra |= {"x.list": [1.5, -2.0], "x.words": ["a", "", "ß"]}
    metadata: Mapping[str, Any] = GGUFReader(make_gguf(tmp_path / "m.gguf", metadata=extra)).metadata
    assert {kind: metadata[f"x.{kind}"] for kind in numbers} == numbers
    assert metadata["x.list"].tolist() == [1.5, -2.0]
    assert metadata["x.words"].strings() == ["a", "", "ß"]


# Safetensors headers by hand.


def safetensors(table: Any, data: bytes = b"", *, claim: int | None = None) -> bytes:
    encoded = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(encoded) if claim is None else claim) + encoded + data


def entry(begin: int, end: int, *, shape: Any = (4,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


LYING = {
    "a gigantic header": safetensors({}, claim=2**63),
    "a header past the end": safetensors({"t": entry(0, 16)}, claim=4096),
    "no JSON": safetensors(b"\xff" * 64),
    "deep JSON": safetensors(b'{"t":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "a list": safetensors([1, 2, 3]),
    "a gigantic shape": safetensors({"t": entry(0, 16, shape=[2**62, 2**62])}, b"\0" * 16),
    "a negative dimension": safetensors({"t": entry(0, 16, shape=[-4])}, b"\0" * 16),
    "a fractional dimension": safetensors({"t": entry(0, 16, shape=[4.5])}, b"\0" * 16),
    "offsets that don't fit the shape": safetensors({"t": entry(0, 12)}, b"\0" * 12),
    "offsets the wrong way round": safetensors({"t": entry(16, 0)}, b"\0" * 16),
    "offsets past the end": safetensors({"t": entry(0, 16)}, b"\0" * 8),
    "bytes of no tensor": safetensors({"t": entry(0, 16)}, b"\0" * 20),
    "a gap": safetensors({"t": entry(0, 16), "u": entry(20, 36)}, b"\0" * 36),
    "an overlap": safetensors({"t": entry(0, 16), "u": entry(8, 24)}, b"\0" * 24),
    "an unknown dtype": safetensors({"t": entry(0, 16, dtype="F31")}, b"\0" * 16),
    "a field too many": safetensors({"t": entry(0, 16, hook="os.system")}, b"\0" * 16),
    "a field too few": safetensors({"t": {"dtype": "F32", "shape": [4]}}, b"\0" * 16),
    "metadata that is no text": safetensors({"__metadata__": {"a": [1]}, "t": entry(0, 16)}, b"\0" * 16),
    "many dimensions": safetensors({"t": entry(0, 4, shape=[1] * 100)}, b"\0" * 4),
    "an empty file": b"",
}


@pytest.mark.parametrize("lie", LYING)
def test_safetensors_that_lie_are_refused(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "lie.safetensors"
    path.write_bytes(LYING[lie])
    with watched(path.stat().st_size), pytest.raises(BrokenModel, match=r"lie\.safetensors") as caught:
        SafetensorsFile(path)
    assert "\n" not in str(caught.value)


def test_a_safetensors_header_of_too_many_tensors_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    table = b"{" + b",".join(b'"%d":0' % index for index in range(600_000)) + b"}"
    path.write_bytes(safetensors(table))
    with watched(path.stat().st_size), pytest.raises(BrokenModel, match="more than 65536 tensors"):
        SafetensorsFile(path)


def test_a_folder_is_no_file_and_a_device_is_not_read(tmp_path: Path, models: Mapping[str, ModelManifest]) -> None:
    (tmp_path / "link.gguf").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="not an ordinary file"):
        open_model(tmp_path / "link.gguf", models=models)
    with pytest.raises(UsageError, match="no such model folder or file"):
        open_model(tmp_path / "absent.gguf", models=models)
