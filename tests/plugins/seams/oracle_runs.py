"""Runs attention backends on the cases that their manifests declare, and prints what was wrong with each as JSON."""

from __future__ import annotations

import json
import sys

from octavo.api.discovery import installed
from octavo.conformance.declared import declared_cases
from octavo.conformance.driver import compare, run_backend, same_stored

LONG = ("long", "huge_logits")  # their oracle takes seconds; length is the reference backend's test


def problems(attention: str, platform_name: str) -> dict[str, str]:
    """By case: what the oracle, or the cache's content, says against it; empty when all is well."""
    backend, platform = installed().load("attention", attention), installed().platform(platform_name)
    platform.bind(0)
    lse = "lse" in backend.manifest.features
    found = {}
    for case in declared_cases(backend.manifest, seed=7):
        if case.name.startswith(LONG):
            continue
        ran = run_backend(backend, platform, case, lse=lse)
        wrong = [str(deviation) for deviation in compare(ran, case, backend.manifest.numerics) if not deviation.passed]
        stored = case.blocks_after()
        wrong += [f"{name} differs" for name in stored if not same_stored(ran.blocks[name][1:], stored[name][1:])]
        wrong += [] if ran.inputs_kept else ["q, k or v was changed"]
        found[case.name] = "; ".join(wrong)
    return found


if __name__ == "__main__":
    chosen = {"seam-functional": "seam-device", "seam-packed": "cpu"}
    json.dump({attention: problems(attention, platform) for attention, platform in chosen.items()}, sys.stdout)
