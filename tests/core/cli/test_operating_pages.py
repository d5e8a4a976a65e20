"""The operator's pages name everything there is."""

from __future__ import annotations

from pathlib import Path

import octavo
from octavo.core.api import errors
from octavo.core.config import EngineConfig
from octavo.core.config.environment import VARIABLES
from octavo.core.discovery.registry import State

DOCS = Path(octavo.__file__).parents[1] / "docs"


def test_every_flag_variable_and_state_is_on_the_operator_s_page() -> None:
    text = (DOCS / "operating.md").read_text()
    flags = ["--" + option.name.replace("_", "-") for _, option in EngineConfig.options() if not option.metadata["internal"]]
    assert [flag for flag in flags if f"`{flag}`" not in text] == []
    assert [name for name, about in VARIABLES.items() if f"| `{name}` | `{about.default}` |" not in text] == []
    assert [state for state in State.__args__ if f"| `{state}` |" not in text] == []  # type: ignore[attr-defined]
    assert all(f"\n| {code} |" in text for code in (0, 1, 2, 3, 4, 130))


def test_every_error_is_listed_with_its_exit_code() -> None:
    text = (DOCS / "errors.md").read_text()
    bases = {"OctavoError", "Refused", "ModelError"}
    for name in set(errors.__all__) - bases:
        assert f"| `{name}` | {getattr(errors, name).exit_code} |" in text
