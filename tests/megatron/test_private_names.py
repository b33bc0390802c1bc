"""The private names of megatron-core that the package uses, each with the upstream line it stands on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CORE = Path(str(distribution("megatron-core").locate_file("megatron/core")))

UPSTREAM = {
    "_GLOBAL_MEMORY_BUFFER": ("parallel_state.py", "_GLOBAL_MEMORY_BUFFER = None"),
    "_MODEL_PARALLEL_RNG_TRACKER_NAME": (
        "tensor_parallel/random.py",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME = 'model-parallel-rng'",
    ),
    "_apply_rotary_pos_emb_bshd": ("models/common/embeddings/rope_utils.py", "def _apply_rotary_pos_emb_bshd("),
    "_copy_main_params_to_model_params": (
        "optimizer/distrib_optimizer.py",
        "    def _copy_main_params_to_model_params(self):",
    ),
    "_preprocess": ("models/gpt/gpt_model.py", "    def _preprocess("),
    "_set_cuda_rng_state": (
        "tensor_parallel/random.py",
        "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False):",
    ),
    "_set_global_memory_buffer": ("parallel_state.py", "def _set_global_memory_buffer():"),
}


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names bound by imports of megatron-core, with their names there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            for alias in node.names:
                yield alias.asname or alias.name, alias.name


def private_names(file: Path) -> set[str]:
    """Those that a file imports, reads of a module, overrides, or asks of an optimizer of Megatron's."""
    tree = ast.parse(file.read_text())
    bound = dict(imported(tree))
    found = {name for name in bound.values() if name.startswith("_")}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", None) in bound for base in node.bases):
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
            calls = {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
            found |= {item.name for item in methods if item.name in calls}
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in {*bound, "sharded"}:
            found.add(node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_is_in_the_list() -> None:
    files = [*(REPOSITORY / "megarl").rglob("*.py"), *(REPOSITORY / "benchmarks").rglob("*.py")]
    assert set().union(*map(private_names, files)) == set(UPSTREAM)


@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_has_the_line(name: str) -> None:
    file, line = UPSTREAM[name]
    assert line in (CORE / file).read_text().splitlines()
