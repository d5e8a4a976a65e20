"""Random models with recurrent layers, the plugin that runs them, and an independent reference in float64."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo import LLM, CompletionOutput

VOCAB_SIZE, HIDDEN, HEADS, HEAD_DIM, INNER, EPS = 64, 24, 2, 8, 32, 1e-5
MIXERS = {"recurrent": ["recurrent", "recurrent"], "hybrid": ["recurrent", "full_attention"]}
TOLERANCE = 1e-3  # of log probabilities: several times what float32 is off


@dataclass
class Reference:
    """The same model in float64: one sequence from its start, its states token by token, and no code of Octavo's."""

    weights: dict[str, Tensor]
    mixers: list[str]
    _known: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), VOCAB_SIZE]: after each token, the log probabilities of the next."""
        key = tuple(token_ids)
        if key not in self._known:
            self._known[key] = self._run(key)
        return self._known[key]

    def assert_greedy(self, prompt: Sequence[int], completion: CompletionOutput) -> None:
        """Each token is the likeliest one after those before it, by more than the tolerance or nearly so."""
        made = completion.token_ids
        expected = self.logprobs([*prompt, *made])[len(prompt) - 1 : -1]
        chosen = self.assert_logprobs(prompt, completion)
        where = f"{made} after {len(prompt)} tokens {list(prompt)}"
        assert float((expected.amax(1) - chosen).max()) < TOLERANCE, f"{where}, expected {expected.argmax(1).tolist()}"

    def assert_logprobs(self, prompt: Sequence[int], completion: CompletionOutput) -> Tensor:
        """Each token's log probability is what it is here; returns these."""
        made = completion.token_ids
        expected = self.logprobs([*prompt, *made])[len(prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(made)[:, None]).squeeze(1)
        assert completion.logprobs is not None
        found = [entries[token].logprob for token, entries in zip(made, completion.logprobs, strict=True)]
        assert found == pytest.approx(chosen.tolist(), abs=TOLERANCE), f"{made} after {len(prompt)} tokens {list(prompt)}"
        return chosen

    def beams(self, prompt: Sequence[int], width: int, num_tokens: int) -> list[tuple[list[int], float]]:
        """The best sequences of a beam search without an end token, best first, with their log probabilities."""
        live = [([], 0.0)]
        for _ in range(num_tokens):
            grown = []
            for made, total in live:
                values, ids = self.logprobs([*prompt, *made])[-1].topk(width)
                grown += [([*made, token], total + value) for value, token in zip(values.tolist(), ids.tolist(), strict=True)]
            live = sorted(grown, key=lambda one: -one[1])[:width]
        return live

    def _run(self, token_ids: Sequence[int]) -> Tensor:
        x = self.weights["model.embed_tokens.weight"][list(token_ids)]
        for index, kind in enumerate(self.mixers):
            hidden = self._norm(x, f"model.layers.{index}.norm")
            q, k, v = (
                self._project(hidden, index, name).unflatten(1, (HEADS, HEAD_DIM)) for name in ("q_proj", "k_proj", "v_proj")
            )
            if kind == "recurrent":
                bias = self.weights[f"model.layers.{index}.gate_proj.bias"]
                gates = 1 / (1 + torch.exp(-self._project(hidden, index, "gate_proj") - bias))
                mixed = _recurrent(q, k, v, gates)
            else:
                mixed = torch.stack([_attention(q[place], k[: place + 1], v[: place + 1]) for place in range(len(x))])
            x = x + self._project(mixed.flatten(1), index, "output_proj")
            hidden = self._norm(x, f"model.layers.{index}.mlp_norm")
            x = x + self._project(torch.tanh(self._project(hidden, index, "up_proj")), index, "down_proj")
        return torch.log_softmax(self._norm(x, "model.norm") @ self.weights["lm_head.weight"].T, dim=-1)

    def _project(self, x: Tensor, index: int, name: str) -> Tensor:
        return x @ self.weights[f"model.layers.{index}.{name}.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + EPS).sqrt() * self.weights[f"{name}.weight"]


def _recurrent(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """Token by token; ``gates`` [tokens, heads]."""
    state, mixed = torch.zeros(HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float64), torch.empty_like(q)
    for place, gate in enumerate(gates):
        state = gate[:, None, None] * state + k[place][:, :, None] * v[place][:, None, :]
        mixed[place] = (q[place][:, :, None] * state).sum(1) * HEAD_DIM**-0.5
    return mixed


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [heads, ·] over keys and values [tokens, heads, ·]."""
    weights = ((k * q).sum(-1) * HEAD_DIM**-0.5).softmax(0)
    return (weights.unsqueeze(-1) * v).sum(0)


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Reference


@pytest.fixture(scope="package", autouse=True)
def gated_states(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The plugin, installed for this process; its backend's class, once an engine has loaded it."""
    from octavo.core.discovery.registry import forget_installed

    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent / "gated_states", site / "gated_states")
    info = site / "gated_states-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gated-states\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    (info / "entry_points.txt").write_text(
        "[octavo.models]\ngated-states = gated_states.model:GatedStatesForCausalLM\n"
        "[octavo.attention_backends]\ngated-states = gated_states.backend:GatedStates\n"
        "gated-states-guessing = gated_states.backend:GatedStates\n"
        "gated-states-in-blocks = gated_states.backend:InBlocks\n"
        "gated-states-unfinished = gated_states.backend:Unfinished\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        forget_installed()
        yield lambda: sys.modules["gated_states.backend"].GatedStates
        for name in [name for name in sys.modules if name.partition(".")[0] == "gated_states"]:
            del sys.modules[name]
    forget_installed()


@pytest.fixture(scope="package", params=sorted(MIXERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Two recurrent layers; or one, and one of full attention."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder, mixers = tmp_path_factory.mktemp(request.param), MIXERS[request.param]
    weights = random_weights(mixers, torch.Generator().manual_seed(1))
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["GatedStatesForCausalLM"],
        "model_type": "gated-states",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": len(mixers),
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 160,
        "rms_norm_eps": EPS,
        "torch_dtype": "float32",
        "mixers": mixers,
    }
    (folder / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return Model(folder, Reference({name: weight.double() for name, weight in weights.items()}, mixers))


def random_weights(mixers: Sequence[str], generator: torch.Generator) -> dict[str, Tensor]:
    """Gates near 1, so that a state says something of every token before; wide enough that greedy tokens vary."""

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(HIDDEN, generator=generator)

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN, generator=generator),
        "lm_head.weight": 2 * matrix(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": norm(),
    }
    for index, kind in enumerate(mixers):
        prefix, inner = f"model.layers.{index}", HEADS * HEAD_DIM
        weights |= {f"{prefix}.{name}.weight": norm() for name in ("norm", "mlp_norm")}
        weights |= {f"{prefix}.{name}_proj.weight": matrix(inner, HIDDEN) for name in "qkv"}
        weights |= {
            f"{prefix}.output_proj.weight": matrix(HIDDEN, inner),
            f"{prefix}.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if kind == "recurrent":
            weights[f"{prefix}.gate_proj.weight"] = matrix(HEADS, HIDDEN)
            weights[f"{prefix}.gate_proj.bias"] = torch.tensor([4.0, 6.0])
    return weights


@pytest.fixture
def open_llm(model: Model) -> Iterator[Callable[..., LLM]]:
    """Opens engines on the model; closes them."""
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        defaults = {"platform": "cpu", "dtype": "float32", "block_size": 8, "max_num_seqs": 8, "kv_cache_memory_bytes": "1M"}
        made.append(LLM(str(model.folder), **{**defaults, **options}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
