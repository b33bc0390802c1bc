"""Groups of test files that stay in one process when several run the suite, and the order of the groups.

A group has files that share an expensive fixture, or one file. Each process takes the next
group when it is nearly done.
"""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

_RANKS = "who uses the warm processes of tests/pool.py"
_DEBUG_RUN = "who looks at the debug run"
_FOLDERS = {
    **dict.fromkeys(("convert", "gpu", "megatron", "resharding"), _RANKS),
    **dict.fromkeys(("cluster", "groups"), "cluster"),
    "rollout": "rollout",
    "slurm": "slurm",
}
_FILES = {
    **dict.fromkeys(("test_sync.py", "test_sync_faults.py"), _RANKS),
    **dict.fromkeys(("test_debug_run.py", "test_eval.py", "test_layouts.py", "test_resume.py"), _DEBUG_RUN),
}
"""Those of tests/e2e."""
_LONG = (
    _RANKS,
    "slurm",
    _DEBUG_RUN,
    "rollout",
    "cluster",
    "tests/launch/test_node_endings.py",
    "tests/e2e/test_asynchronous.py",
    "tests/chaos/test_chaos.py",
    "tests/e2e/test_recipes.py",
    "tests/launch/test_ray_job.py",
    "tests/test_benchmarks.py",
    "tests/sort_letters/test_whole.py",
    "tests/e2e/test_grpo.py",
    "tests/launchers/test_local.py",
    "tests/e2e/test_endings.py",
    "tests/e2e/test_stages.py",
    "tests/launch/test_node_start.py",
    "tests/test_gpu_benchmark.py",
    "tests/test_types.py",
    "tests/launchers/test_training.py",
)
"""Groups that take half a minute or more, the longest first; the others, which are quick, fill the gap at the end."""


def group(file: PurePath) -> str:
    """The group of a file, whose path is relative to the repository."""
    folder = file.parts[1]
    return _FOLDERS.get(folder) or (_FILES.get(file.name) if folder == "e2e" else None) or str(file)


def place(file: PurePath) -> int:
    """The place of a file's group in the suite."""
    name = group(file)
    return _LONG.index(name) if name in _LONG else len(_LONG)


class GroupScheduling(LoadScopeScheduling):
    """Gives whole groups to the processes of pytest-xdist, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        return group(PurePath(nodeid.partition("::")[0]))
