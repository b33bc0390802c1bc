"""Writes the certificates of model families: what ``megarl check-model`` finds for their default configs.

One to three minutes for each family on two cores; ``tools/docs/certificates_page.py`` makes a page of the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from megarl.model_check.checks import check_model
from megarl.models.families import FAMILIES

RESULTS = Path(__file__).parent / "results" / "certificates.jsonl"

PACKAGES = ("torch", "megatron-core", "transformers", "vllm")
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "max_position_embeddings": 131072,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v2": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
}
"""Fields of Llama 3.1, GLM-4.5-Air, GLM-4.7-Flash, DeepSeek-V2-Lite and V3, and gpt-oss."""


def default_config(model_type: str) -> dict[str, Any]:
    """Returns the config that transformers has for a family by default, with what published ones have besides."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type).to_dict()
    return {**config, **_PUBLISHED.get(model_type, {}), "architectures": [FAMILIES[model_type].lm_class]}


def certificate(model_type: str) -> dict[str, Any]:
    """Returns the findings of a family."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "config_alone"
        workspace = Path(name) / "workspace"
        model.mkdir()
        workspace.mkdir()
        (model / "config.json").write_text(json.dumps(default_config(model_type)))
        findings: list[dict[str, Any]] = []
        for finding in check_model(model, workspace):
            print(f"{model_type}: {finding.check}: {finding.status}: {finding.detail}", flush=True)
            findings.append(asdict(finding))
    versions = {package: _version(package) for package in PACKAGES}
    return {"family": model_type, "date": time.strftime("%Y-%m-%d"), "versions": versions, "findings": findings}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return metadata.version(f"{package}-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="MODEL_TYPE", help="families to renew; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file of the certificates, a line each")
    arguments = parser.parse_args()
    unknown = set(arguments.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"no families: {', '.join(unknown)}; known are {', '.join(FAMILIES)}")
    found: dict[str, Any] = {}
    if arguments.out.exists():
        for line in arguments.out.read_text().splitlines():
            known = json.loads(line)
            found[known["family"]] = known
    for family in arguments.families or FAMILIES:
        found[family] = certificate(family)
        ordered = [json.dumps(found[each]) for each in FAMILIES if each in found]
        arguments.out.write_text("\n".join(ordered) + "\n")


if __name__ == "__main__":
    main()
