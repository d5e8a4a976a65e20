"""What ``octavo doctor`` finds out. Plugins are loaded, and torch imported, in helper processes; mismatches get remedies."""

from __future__ import annotations

import json
import os
import platform as host
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo.core.api import API_VERSION
from octavo.core.config import environment
from octavo.core.discovery.manifest import manifest_problems
from octavo.core.discovery.registry import LABELS, PluginEntry, Registry
from octavo.core.discovery.requirements import installed_version, unmet
from octavo.core.discovery.torch_extensions import torch_extensions

PACKAGES = ("torch", "numpy", "safetensors", "gguf", "tokenizers", "jinja2", "msgspec", "pluggy", "click", "transformers")
_LOAD_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that isn't as it should be, and what to do about it."""

    subject: str
    problem: str
    remedy: str
    severity: str = "warning"  # or "error": something that was installed can't be used


@dataclass(kw_only=True)
class Diagnosis:
    """Everything that ``octavo doctor`` prints. Holds no secrets: `document` masks what looks like one."""

    octavo: Mapping[str, str]
    environment: Mapping[str, Any]
    packages: Mapping[str, str | None]
    torch: Mapping[str, Any]
    devices: Sequence[Mapping[str, Any]]
    plugins: Sequence[Mapping[str, Any]]
    findings: list[Finding] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        masked = _masked(asdict(self))
        assert isinstance(masked, dict)
        return masked


def diagnose(registry: Registry) -> Diagnosis:
    """Probe and load everything that is installed."""
    registry.probe()
    torch, torch_findings = _torch()
    loads = _load_all([entry for entry in registry.entries if entry.usable], autoload=torch["imports"])
    for entry in registry.entries:
        _note_load(entry, loads.get((entry.kind, entry.name)))
    diagnosis = Diagnosis(
        octavo={"version": installed_version("octavo") or "?", "api": ".".join(map(str, API_VERSION))},
        environment=_environment(),
        packages={name: installed_version(name) for name in PACKAGES},
        torch=torch,
        devices=[
            {"platform": entry.name, **asdict(device)} for entry in registry.of_kind("platform") for device in entry.devices
        ],
        plugins=[_plugin(entry) for entry in registry.entries],
    )
    diagnosis.findings += [*torch_findings, *_of_environment(), *_of_plugins(registry), *_of_distributions(registry)]
    return diagnosis


def _environment() -> Mapping[str, Any]:
    return {
        "python": host.python_version(),
        "implementation": host.python_implementation(),
        "system": f"{host.system()} {host.release()}",
        "machine": host.machine(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        "virtual_environment": sys.prefix != sys.base_prefix,
        "prefix_hash": _prefix_hash(),
        "variables": environment.given(),
    }


def _prefix_hash() -> str:
    """How SHA-256 keys of the prefix cache are made here."""
    from octavo.core.kv_cache import hashing

    if hashing.COMPILED_SHA256 is not None:
        return "sha256 compiled"
    return "sha256 of hashlib (octavo was installed without a C compiler, or the processor has no SHA instructions)"


def _torch() -> tuple[Mapping[str, Any], Sequence[Finding]]:
    """Whether torch can be imported, with and without what it loads by itself."""
    extensions = torch_extensions()
    about: dict[str, Any] = {
        "version": installed_version("torch"),
        "extensions": [asdict(extension) for extension in extensions],
        "autoload": environment.torch_autoload(),
    }
    if about["version"] is None:
        missing = Finding(
            subject="torch", problem="torch isn't installed", remedy="pip install octavo brings it", severity="error"
        )
        return {**about, "imports": False, "error": "not installed"}, [missing]
    error = _import_torch()
    about |= {"imports": not error, "error": error}
    if not error:
        return about, []
    found = re.search(r"backend extension: ([\w.-]+?)\.? ", error)  # torch's own words
    if extensions and found:
        named = [str(extension) for extension in extensions if extension.name == found[1]]
        return about, [
            Finding(
                subject=", ".join(named or map(str, extensions)),
                problem=f"breaks `import torch`, which loads it by itself: {error}",
                remedy=f"repair or uninstall it, or set {environment.TORCH_AUTOLOAD}=0",
                severity="error",
            )
        ]
    return about, [Finding(subject="torch", problem=f"can't be imported: {error}", remedy="reinstall torch", severity="error")]


def _import_torch() -> str:
    """Import torch in a process of its own; the error, or nothing."""
    code = (
        "import sys\n"
        "try:\n import torch\n"
        "except BaseException as error:\n"
        " cause = error.__cause__\n"
        " print(error, f'({type(cause).__name__}: {cause})' if cause else '', file=sys.stderr); sys.exit(9)\n"
    )
    env = {**os.environ, "PYTHONPATH": _python_path()}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=_LOAD_LIMIT_S, env=env, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the import takes more than {_LOAD_LIMIT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or [f"the process ended with {done.returncode}"]
    return lines[-1].strip()


def _load_all(entries: Sequence[PluginEntry], *, autoload: bool) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Load each plugin in a helper; one that kills the helper costs only itself."""
    left = [(str(entry.kind), entry.name) for entry in entries]
    answers: dict[tuple[str, str], Mapping[str, Any]] = {}
    while left:
        env = {**os.environ, "PYTHONPATH": _python_path()} | ({} if autoload else {environment.TORCH_AUTOLOAD: "0"})
        started, code = _load_some(left, env, answers)
        died = [key for key in started if key not in answers]
        for key in died:
            how = f"killed the process ({code})" if code is not None else f"took more than {_LOAD_LIMIT_S:g} s to load"
            answers[key] = {"ok": False, "error": how, "traceback": None}
        before = len(left)
        left = [key for key in left if key not in answers]
        if len(left) == before:  # the helper itself doesn't start: nothing will ever be answered
            answers |= {key: {"ok": False, "error": f"the helper process ended with {code}", "traceback": None} for key in left}
            left = []
    return answers


def _load_some(
    keys: Sequence[tuple[str, str]], env: Mapping[str, str], answers: dict[tuple[str, str], Mapping[str, Any]]
) -> tuple[Sequence[tuple[str, str]], int | None]:
    """Run the helper on ``keys``, as far as it gets; what was begun, and the exit code (None: out of time)."""
    command = [sys.executable, "-P", "-m", "octavo.core.discovery.load_runner"]
    code: int | None
    try:
        done = subprocess.run(
            command, input=json.dumps(keys).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=_LOAD_LIMIT_S,
            env=dict(env), check=False,
        )  # fmt: skip
        output, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = late.stdout or b"", None
    started = []
    for line in output.splitlines():
        answer = json.loads(line)
        key = (answer["kind"], answer["name"])
        if "ok" in answer:
            answers[key] = answer
        else:
            started.append(key)
    return started, code


def _python_path() -> str:
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _note_load(entry: PluginEntry, answer: Mapping[str, Any] | None) -> None:
    if answer is None:
        return
    if answer["ok"]:
        entry.warning = entry.warning or answer.get("warning", "")
    else:
        entry.state, entry.reason, entry.traceback = "failed-to-load", answer["error"], answer["traceback"]


def _plugin(entry: PluginEntry) -> Mapping[str, Any]:
    return {
        "name": entry.name,
        "kind": entry.kind,
        "distribution": entry.distribution,
        "version": entry.version,
        "api": ".".join(map(str, entry.manifest.api)) if entry.manifest else None,
        "state": entry.state,
        "reason": entry.reason,
        "warning": entry.warning,
        "traceback": entry.traceback,
    }


def _of_environment() -> Iterator[Finding]:
    for line in environment.unknown():
        yield Finding(subject=line.split()[2], problem=line, remedy="unset it, or use the right name")
    folder = environment.cache_dir()
    if folder.exists() and not os.access(folder, os.W_OK):
        yield Finding(
            subject=str(folder), problem="the models' folder can't be written", remedy="set OCTAVO_CACHE_DIR to another"
        )


_REMEDIES = {
    "incompatible": "install a version that fits, or uninstall it",
    "probe-absent": "nothing, if this machine has no such device",
    "probe-broken": "repair what the probe needs, or report it to the vendor",
    "failed-to-load": "repair what its module needs (the traceback says where it failed), or report it to the vendor",
}


def _of_plugins(registry: Registry) -> Iterator[Finding]:
    told: set[str] = set()
    for entry in registry.entries:
        subject = f"{LABELS[entry.kind]} {entry.name} ({entry.origin})"
        if not entry.usable and entry.reason not in told:
            told.add(entry.reason)
            for problem in _all_problems(entry):
                yield Finding(
                    subject=subject,
                    problem=f"{entry.state}: {problem}",
                    remedy=entry.hint or _REMEDIES[entry.state],
                    severity="warning" if entry.state == "probe-absent" else "error",
                )
        elif entry.warning:
            yield Finding(subject=subject, problem=entry.warning, remedy="report it to the vendor")


def _all_problems(entry: PluginEntry) -> Sequence[str]:
    """Every mistake of a broken manifest; of anything else the one reason."""
    path = Path(entry.reason.partition(": ")[0])
    if entry.manifest is None and path.name == "octavo-plugin.toml" and path.is_file():
        return manifest_problems(path) or (entry.reason,)
    return (entry.reason,)


def _of_distributions(registry: Registry) -> Iterator[Finding]:
    """Requirements of Octavo and of plugins' distributions that aren't met."""
    import importlib_metadata

    for name in sorted({"octavo", *(entry.distribution for entry in registry.entries)}):
        try:
            requires = importlib_metadata.distribution(name).requires or ()
        except importlib_metadata.PackageNotFoundError:
            continue
        for line in unmet(requires):
            yield Finding(subject=name, problem=line, remedy=f"pip install --upgrade {name}, or the version it asks for")


_SECRETS = re.compile(
    r"(?i)((?:[\w-]*(?:token|secret|passw(?:or)?d|api[_-]?key|credential)[\w-]*)[\"']?\s*[=:]\s*[\"']?)[^\s\"',;]+"
)
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")


def _masked(value: Any) -> Any:
    """The same with secrets and the home folder masked in every text."""
    if isinstance(value, str):
        text = _USER_INFO.sub("***@", _SECRETS.sub(r"\1***", value))
        home = str(Path.home())
        return text.replace(home, "~") if len(home) > 1 else text
    if isinstance(value, Mapping):
        return {key: _masked(item) for key, item in value.items()}
    return [_masked(item) for item in value] if isinstance(value, (list, tuple)) else value
