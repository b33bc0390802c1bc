"""Imports point downward, and each heavy library has one importer. Read from the source, with imports in functions."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from megarl.lazy_compiling import _packages_distributions, distributions_by_records

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "megarl"

# A part may import the parts of the lines above it, and itself.
LAYERS = (
    {"bounds", "decoder_fields", "errors", "files", "garbage_collection", "lazy_compiling"},
    {"plugins", "remote", "stacks", "texts", "types"},
    {"weights"},
    {"algos", "models"},
    {"config"},
    {"role_specs"},
    {"cluster", "data"},
    {"rewards"},
    {"environments"},
    {"conversations"},
    {"experience"},
    {"resharding"},
    {"megatron", "rollout"},
    {"groups"},
    {"run"},
    {"preflight"},
    {"loop"},
    {"stages"},
    {"convert", "dashboard", "doctor", "init", "plan"},
    {"model_check"},
    {"launch"},
    {"cli"},
    {"__main__"},
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}

ONLY_IMPORTER = {"megatron": "megatron", "vllm": "rollout", "ray": "cluster"}
NEVER = ("nemo_run", "launchers")
"""What no part of the package imports: the scripts of launchers/ are above it, and alone with NeMo-Run."""

SCRIPT_IMPORTS = {
    "invoke",
    "jinja2",
    "launchers",
    "nemo_run",
    "paramiko",
    "torchx",
    "typer",
    "megarl.config",
    "megarl.launch",
}
"""What those scripts import besides the standard library, so that they run where there is no torch."""

TORCH_FREE = (
    "types",
    "run.checkpoints",
    "algos.registry",
    "config",
    "files",
    "run.attempts",
    "run.display",
    "run.sinks",
    "plan",
    "plugins",
    "remote",
    "doctor",
    "cli",
    "convert.cli",
    "cluster.ray_node",
    "launch.cli",
    "init",
    "launch.node.__main__",
    "run.resume",
    "dashboard.status.show",
    "dashboard.view.page_server",
    "rollout.engine",  # what torch caches, it reads from the environment that an engine sets
    "weights.shard_map",
    "weights.planner",
    "models",
)
HEAVY = ("torch", "transformers", "ray", "vllm", "megatron")


def part_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """The dotted names that a source imports, wherever in it, `import_module` of a literal included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def objections(part: str, name: str) -> Iterator[str]:
    """The reasons why a part must not import a name."""
    top, *rest = name.split(".")
    if top in ONLY_IMPORTER and ONLY_IMPORTER[top] != part:
        yield f"only megarl.{ONLY_IMPORTER[top]} imports {top}"
    if top in NEVER:
        yield f"only the scripts of launchers/ import {top}"
    if top == "megarl" and rest and rest[0] != part and HEIGHT[rest[0]] >= HEIGHT[part]:
        yield f"megarl.{part} is not above megarl.{rest[0]}"
    if name.startswith("megatron.core.dist_checkpointing"):
        yield "checkpoints are torch's own, and megarl.convert writes and reads Megatron-LM's format by itself"
    if part == "algos" and (name.startswith("torch.distributed") or rest[:1] == ["config"]):
        yield "algorithm math is pure: no configuration, nothing distributed"


SOURCES = sorted(file for file in PACKAGE.rglob("*.py") if file != PACKAGE / "__init__.py")


def test_every_package_is_in_the_import_order() -> None:
    assert {part_of(file) for file in SOURCES} <= set(HEIGHT)


@pytest.mark.parametrize("part", sorted({part_of(file) for file in SOURCES}))
def test_imports_point_downward(part: str) -> None:
    found = [
        f"{file.relative_to(REPOSITORY)} imports {name}: {objection}"
        for file in SOURCES
        if part_of(file) == part
        for name in imports(file.read_text(encoding="utf-8"))
        for objection in objections(part, name)
    ]
    assert not found, "\n".join(found)


def module_level(tree: ast.Module) -> Iterator[str]:
    """The names that a module imports while it is imported, and those of its types."""
    statements = list(tree.body)
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            statements += node.body
    top = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    yield from imports(ast.unparse(ast.Module(body=list(top), type_ignores=[])))


def test_there_are_no_import_cycles() -> None:
    """Not between types either."""
    modules = {".".join(file.relative_to(REPOSITORY).with_suffix("").parts): file for file in SOURCES}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        imported = set(module_level(ast.parse(file.read_text(encoding="utf-8"))))
        graph[name] = {owner for of in imported for owner in (of, of.rpartition(".")[0]) if owner in modules} - {name}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_nemo_run_scripts_import_nothing_heavy() -> None:
    found = {
        f"{file.relative_to(REPOSITORY)} imports {name}"
        for file in (REPOSITORY / "launchers").rglob("*.py")
        for name in imports(file.read_text(encoding="utf-8"))
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not any(f"{name}.".startswith(f"{allowed}.") for allowed in SCRIPT_IMPORTS)
    }
    assert not found, "\n".join(sorted(found))


def test_the_import_check_detects_violations() -> None:
    source = (
        "def f():\n    from megarl.loop import ppo\n    import ray.util\n    importlib.import_module('vllm.entry')\n"
    )
    assert list(imports(source)) == ["megarl.loop.ppo", "ray.util", "vllm.entry"]
    assert list(objections("rollout", "megarl.megatron.worker.MegatronWorker"))
    assert list(objections("rollout", "megatron.core.parallel_state"))
    assert list(objections("algos", "torch.distributed"))
    assert list(objections("launch", "nemo_run.config"))
    assert list(objections("launch", "launchers.scripts"))
    assert not list(objections("rollout", "megarl.resharding.sync"))
    assert not list(objections("megatron", "megatron.core"))


@pytest.mark.process
def test_the_driver_imports_neither_megatron_core_nor_vllm() -> None:
    """It names the methods of their workers."""
    code = (
        "import sys, megarl.stages.ppo.trainer, megarl.stages.eval.trainer; from megarl.groups import trainers as t; "
    )
    code += "print(t.MegatronWorker.update.phase, [name for name in ('megatron.core', 'vllm') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.stdout.strip(), done.stderr) == ("update []", "")


@pytest.mark.parametrize("part", TORCH_FREE)
@pytest.mark.process
def test_light_modules_import_nothing_heavy(part: str) -> None:
    code = f"import sys, megarl.{part}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_distributions_are_found_as_the_standard_library_finds_them() -> None:
    expected = importlib.metadata.packages_distributions()
    with distributions_by_records():
        found = importlib.metadata.packages_distributions()
    assert "transformers" in expected
    assert {name: set(found[name]) for name in expected} == {name: set(names) for name, names in expected.items()}
    assert importlib.metadata.packages_distributions is not _packages_distributions
