"""The page of the certificates of model families; this module as a script prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.certificates import RESULTS
from megarl.loop.logprob_check import TOLERANCES as AGREEMENT
from megarl.model_check.checks import LAYOUTS, OTHER_EXPERTS, TOLERANCES
from megarl.models.families import FAMILIES

INTRODUCTION = Path(__file__).with_name("certificates.md")
_HEADING = ("`model_type`", "date", "engine loader", *LAYOUTS, "conversion", "rollouts")


def markdown() -> str:
    """Returns the whole page."""
    certificates = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    introduction = INTRODUCTION.read_text(encoding="utf-8")
    for name, value in {**TOLERANCES, **AGREEMENT, "other experts": OTHER_EXPERTS}.items():
        introduction = introduction.replace(f"{{{name}}}", f"{value:g}")
    return f"{introduction}\n## Families\n\n{_versions(certificates)}\n{_table(certificates)}"


def _versions(certificates: Sequence[Mapping[str, Any]]) -> str:
    versions: set[str] = set()
    for certificate in certificates:
        versions.add(", ".join(" ".join(each) for each in certificate["versions"].items()))
    text = "".join(f"With {line}.\n" for line in sorted(versions))
    missing = FAMILIES.keys() - {certificate["family"] for certificate in certificates}
    if missing:
        text += f"Without a certificate yet: {', '.join(sorted(missing))}.\n"
    return text


def _table(certificates: Sequence[Mapping[str, Any]]) -> str:
    lines = [_HEADING, ("---",) * len(_HEADING)]
    for certificate in certificates:
        findings = {finding["check"]: finding for finding in certificate["findings"]}
        cells = [f"`{certificate['family']}`", certificate["date"]]
        cells.append(_status(findings.get("engine loader")))
        for layout in LAYOUTS:
            cells.append(_step(findings.get(f"training, {layout}")))
        cells.append(_status(findings.get("conversion")))
        cells.append(_rollouts(findings.get("rollouts")))
        lines.append(tuple(cells))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _status(finding: Mapping[str, Any] | None) -> str:
    """What a check has found, where it has no numbers."""
    if finding is None:
        return ""
    return "equal" if finding["status"] == "passed" else finding["status"]


def _step(finding: Mapping[str, Any] | None) -> str:
    """The differences of losses, gradient and weights."""
    if finding is None or finding["status"] != "passed":
        return _status(finding)
    numbers = finding["numbers"]
    loss = max(numbers["loss"], numbers["next loss"])
    return f"{loss:.0e}, {numbers['gradient']:.0e}, {numbers['weights']:.0e}"


def _rollouts(finding: Mapping[str, Any] | None) -> str:
    """The dtype, and the differences before training and in it."""
    if finding is None or finding["status"] != "passed":
        return _status(finding)
    before, *steps = finding["numbers"].values()
    return f"{finding['dtype']}: {before:.0e}, {max(steps):.0e}"


if __name__ == "__main__":
    print(markdown(), end="")
