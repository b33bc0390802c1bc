"""The certificates of the model families, and their page."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.certificates import RESULTS, default_config
from megarl.model_check.checks import LAYOUTS
from megarl.models import model_spec
from megarl.models.families import FAMILIES
from tools.docs.certificates_page import markdown

PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"


def test_certificates_have_all_checks_and_are_on_the_page() -> None:
    certificates = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    families = [certificate["family"] for certificate in certificates]
    assert families == [family for family in FAMILIES if family in families]
    for certificate in certificates:
        has_experts = model_spec(default_config(certificate["family"])).dims.experts > 0
        layouts = [f"training, {name}" for name, layout in LAYOUTS.items() if layout.ep == 1 or has_experts]
        expected = ["config", "small model", "engine loader", "transformers", *layouts, "conversion", "rollouts"]
        if certificate["family"] == "gpt_oss":
            expected.remove("conversion")  # which is refused
        passed = [finding["check"] for finding in certificate["findings"] if finding["status"] == "passed"]
        assert passed == expected, certificate["family"]
    assert PAGE.read_text() == markdown(), "run make docs"
