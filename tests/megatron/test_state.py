"""Resumed roles equal uninterrupted ones: bit for bit in the same layout, with exact state in others."""

from __future__ import annotations

import math
import pickle
import re
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from megarl.files import FileRecord
from megarl.types import Layout, RoleName
from tests.disk import SmallDisk
from tests.megatron.families import MIXTURES, MODELS
from tests.megatron.tiny import save_model
from tests.megatron.training import Snapshot, canonical, differing, make_roles, plan, restore, save, snapshot, train
from tests.pool import RankPool

pytestmark = pytest.mark.dist

Roles = Mapping[RoleName, Layout]
Model = tuple[str, dict[str, Any]]
"""A kind of model, and fields of its config."""


def _interrupted(
    rank: int, models: dict[RoleName, Path], others: dict[RoleName, Path], layouts: Roles, dtype: torch.dtype, out: Path
) -> dict[RoleName, Any]:
    """Four steps of each role at a stretch, and two steps, a checkpoint, and two steps of new roles."""
    straight = make_roles(rank, models, layouts, dtype)
    first = make_roles(rank, models, layouts, dtype)
    second = make_roles(rank, others, layouts, dtype)
    metrics: dict[RoleName, Any] = {}
    for step in range(4):  # the roles alternate, as in a run
        for name, role in straight.items():
            metrics.setdefault(name, []).extend(train(role, step, 1, broken=[1]))
    for name, role in first.items():
        train(role, 0, 2, broken=[1])
        save(role, out / name)
    results: dict[RoleName, Any] = {}
    for name, role in second.items():
        train(role, 7, 1)  # the replaced state is not a fresh one
        restore(role, out / name)
        assert (role.steps_taken, role.adam_steps) == (2, 1)
        resumed = train(role, 2, 2)
        results[name] = metrics[name][2:], resumed, snapshot(straight[name]), snapshot(role)
    return results


TIED: Model = "qwen2", {"tie_word_embeddings": True}
UNTIED: Model = "qwen2", {}
GPT2: Model = "gpt2", {"n_layer": 5}  # transposed, and in stages of unequal lengths
EXPERTS: Model = MIXTURES["mixtral"].kind, dict(MIXTURES["mixtral"].fields)
CASES: dict[str, tuple[Roles, Model, torch.dtype]] = {
    "PP2 x TP2 and DP4": ({"actor": Layout(tp=2, pp=2), "critic": Layout(dp=4)}, TIED, torch.float32),
    "DP2 x TP2 with SP and PP4": (
        {"actor": Layout(tp=2, dp=2, sequence_parallel=True), "reward": Layout(pp=4)},
        UNTIED,
        torch.bfloat16,
    ),
    "PP2 x DP2 and TP2 x DP2": ({"actor": Layout(pp=2, dp=2), "critic": Layout(tp=2, dp=2)}, TIED, torch.bfloat16),
    "PP2 x EP2": ({"actor": Layout(pp=2, dp=2, ep=2)}, EXPERTS, torch.bfloat16),
    "PP2 interleaved and PP2": ({"actor": Layout(pp=2, vpp=2), "reward": Layout(pp=2)}, GPT2, torch.float32),
}


MORE = ("PP2 x DP2 and TP2 x DP2", "PP2 interleaved and PP2")
"""Of `make matrix`."""


@pytest.mark.parametrize(
    ("layouts", "model", "dtype"),
    [pytest.param(*case, id=name, marks=pytest.mark.matrix if name in MORE else ()) for name, case in CASES.items()],
)
def test_resumed_roles_continue_bit_for_bit(
    pool: RankPool, tmp_path: Path, layouts: Roles, model: Model, dtype: torch.dtype
) -> None:
    kind, fields = model
    models: dict[RoleName, Path] = {}
    others: dict[RoleName, Path] = {}
    for seed, name in enumerate(layouts):
        models[name] = save_model(tmp_path / f"{name}-model", kind, seed, **fields)
        others[name] = save_model(tmp_path / f"{name}-other", kind, seed + 10, **fields)
    world = next(iter(layouts.values())).world_size
    results = pool.run(_interrupted, models, others, layouts, dtype, tmp_path, world_size=world, timeout=240)
    for result in results:
        for name in layouts:
            straight_metrics, resumed_metrics, straight, resumed = result[name]
            assert straight_metrics == resumed_metrics
            assert_same(straight, resumed)
            assert straight.counters == (4, 3)
            assert straight.adam_steps <= {3.0}


def assert_same(one: Snapshot, other: Snapshot) -> None:
    """Equal bits, padding included."""
    assert one.counters == other.counters
    assert one.moments.keys() == other.moments.keys()
    assert not any(differing(one, other).values()), differing(one, other)


def _saved(
    rank: int, model: Path, name: RoleName, layout: Layout, dtype: torch.dtype, steps: int, out: Path
) -> tuple[Snapshot, list[FileRecord]]:
    role = make_roles(rank, {name: model}, {name: layout}, dtype)[name]
    train(role, 0, steps)
    return snapshot(role), save(role, out)


def _restored(rank: int, model: Path, name: RoleName, layout: Layout, dtype: torch.dtype, saved: Path) -> Snapshot:
    role = make_roles(rank, {name: model}, {name: layout}, dtype)[name]
    restore(role, saved)
    return snapshot(role)


SP2, EP2 = Layout(tp=2, sequence_parallel=True), Layout(dp=2, ep=2)
ONE, TP4, PP4, INTERLEAVED = Layout(), Layout(tp=4), Layout(pp=4), Layout(pp=2, vpp=2)
MIXTURE = "qwen3_moe_renormalised"


@pytest.mark.parametrize(
    ("name", "family", "layout", "dtype", "elsewhere"),
    [
        ("actor", "gpt2", Layout(tp=2, pp=2), torch.bfloat16, [TP4, Layout(dp=3), INTERLEAVED]),
        pytest.param(
            *("critic", "gpt2", Layout(tp=2, pp=2), torch.bfloat16, [ONE, PP4, replace(SP2, dp=2)]),
            marks=pytest.mark.matrix,
        ),
        ("actor", "qwen3", Layout(tp=2, dp=2), torch.float32, [ONE, PP4, replace(SP2, dp=2)]),
        pytest.param(
            *("critic", "qwen3", Layout(tp=2, dp=2), torch.float32, [TP4, Layout(dp=3), INTERLEAVED]),
            marks=pytest.mark.matrix,
        ),
        ("actor", MIXTURE, replace(EP2, pp=2), torch.bfloat16, [ONE, replace(SP2, dp=2, ep=2), INTERLEAVED]),
        ("actor", MIXTURE, replace(SP2, dp=2, ep=2), torch.float32, [Layout(dp=3, ep=3), Layout(dp=4, ep=2)]),
    ],
    ids=str,
)
def test_any_layout_loads_any_others_checkpoint(
    pool: RankPool,
    tmp_path: Path,
    name: RoleName,
    family: str,
    layout: Layout,
    dtype: torch.dtype,
    elsewhere: list[Layout],
) -> None:
    """Weights and moments are exact: transposed, tied, of heads that ranks share, and however vocabularies are padded.

    The dense models have seven layers, which no number of stages divides. Every expert is written once.
    """
    model = MODELS[family].save(tmp_path / "model")
    other = MODELS[family].save(tmp_path / "other", seed=1)
    saved = pool.run(_saved, model, name, layout, dtype, 2, tmp_path / name, world_size=4)
    expected = canonical([held for held, _ in saved])
    assert all(values.isfinite().all() for values in expected.values())
    average = {"average"} if name == "actor" else set()
    assert {key.split(" ")[0] for key in expected} == {"weight", "param", "exp_avg", "exp_avg_sq"} | average
    for reader in elsewhere:
        got = pool.run(_restored, other, name, reader, dtype, tmp_path / name, world_size=reader.world_size)
        assert {held.counters for held in got} == {(2, 2)}
        assert {steps for held in got for steps in held.adam_steps} == {2.0}
        found = canonical(got)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            assert torch.equal(found[key], values), f"{key} in {reader}"


OLD_MIXTURE = {
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}


@pytest.mark.parametrize(
    ("archive", "kind", "fields", "layout"),
    [
        ("version-0.1", "qwen2", {"num_hidden_layers": 1, "tie_word_embeddings": True}, Layout(tp=2)),
        ("version-0.1-mixture", "qwen3_moe", OLD_MIXTURE, replace(SP2, dp=2, ep=2)),
    ],
    ids=["dense", "mixture"],
)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_version_0_1_is_restored(
    pool: RankPool, tmp_path: Path, archive: str, kind: str, fields: dict[str, Any], layout: Layout
) -> None:
    """Written on two replicas: a bfloat16 actor with an average, one of its steps skipped.

    Of the dense model with megatron-core 0.16.1, of the mixture on EP2 before layers had kinds, when every expert had
    parameters of its own. torch reads the same files on its own.
    """
    with tarfile.open(Path(__file__).with_name(f"{archive}.tar.xz")) as files:
        files.extractall(tmp_path, filter="data")
    model = save_model(tmp_path / "model", kind, **fields)
    got = pool.run(_restored, model, "actor", layout, torch.bfloat16, tmp_path / "actor", world_size=layout.world_size)
    assert {held.counters for held in got} == {(2, 1)}
    found = canonical(got)
    infos: Any = FileSystemReader(tmp_path / "actor").read_metadata().state_dict_metadata
    stored: dict[str, Any] = {key: torch.empty(info.size, dtype=info.properties.dtype) for key, info in infos.items()}
    load_state(stored, checkpoint_id=tmp_path / "actor", no_dist=True)
    assert len(stored) == len(found)
    for key, values in stored.items():
        kind, name = key.split(".", 1)
        assert torch.equal(found[f"{'param' if kind == 'master' else kind} {name}"], values.float()), key


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(pp=2, dp=2)])
def test_every_element_is_written_once(pool: RankPool, tmp_path: Path, layout: Layout) -> None:
    """Replicas divide the writing of weights; stages hold different slices of optimizer state of tied weights."""
    model = save_model(tmp_path / "model", tie_word_embeddings=True)
    saved = pool.run(_saved, model, "actor", layout, torch.float32, 1, tmp_path / "actor", world_size=4)
    files = [record for _, records in saved for record in records]
    assert sorted(record.path for record in files) == sorted(path.name for path in (tmp_path / "actor").iterdir())
    for record in files:
        assert record == FileRecord.of(tmp_path / "actor" / record.path, tmp_path / "actor")
    stored = FileSystemReader(tmp_path / "actor").read_metadata().state_dict_metadata
    expected = canonical([held for held, _ in saved])
    assert len(stored) == len(expected) * 4 // 5, "in float32 the optimizer's parameters are the weights"
    for key, info in stored.items():
        kind, name = key.split(".", 1)
        assert isinstance(info, TensorStorageMetadata)
        assert info.size == expected[f"{kind} {name}"].shape
        assert sum(math.prod(chunk.sizes) for chunk in info.chunks) == math.prod(info.size)
    sizes = [record.nbytes for record in files if record.path.endswith(".distcp")]
    assert len(sizes) == 4
    assert max(sizes) < sum(sizes) / 2


def _written_later(
    rank: int, model: Path, layout: Layout, dtype: torch.dtype, out: Path
) -> tuple[list[FileRecord], list[FileRecord], list[Any], list[Any]]:
    """A role is saved, trained while its copy is written, and compared with one that trains alone."""
    role, alone = (make_roles(rank, {"actor": model}, {"actor": layout}, dtype)["actor"] for _ in range(2))
    for each in (role, alone):
        train(each, 0, 2)
    at_once = save(role, out / "at once")
    write = plan(role, out / "later")
    metrics = train(role, 2, 1)
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(write)
        metrics += train(role, 3, 2)
        return at_once, written.result(), metrics, train(alone, 2, 3)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(tp=2, pp=2), torch.float32),
        (Layout(tp=2, dp=2, sequence_parallel=True), torch.bfloat16),
        (Layout(), torch.float32),
    ],
)
def test_what_is_written_during_later_steps_is_what_a_save_writes_at_once(
    pool: RankPool, tmp_path: Path, layout: Layout, dtype: torch.dtype
) -> None:
    """Weights, average, moments and counters are those of the save's step, and the steps are those of a role alone."""
    model = save_model(tmp_path / "model", "gpt2", n_layer=4)  # some tensors are transposed, some tied
    ranks = pool.run(_written_later, model, layout, dtype, tmp_path, world_size=layout.world_size)
    for at_once, later, metrics, alone in ranks:
        assert metrics == alone
        assert [record.path for record in later] == [record.path for record in at_once]
        for one, other in zip(at_once, later, strict=True):
            assert one == other or one.path == ".metadata"
    found = [FileSystemReader(tmp_path / name).read_metadata() for name in ("at once", "later")]
    assert found[0].state_dict_metadata == found[1].state_dict_metadata
    assert found[0].storage_data == found[1].storage_data


def test_a_role_that_has_not_stepped_is_saved_too(pool: RankPool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    other = save_model(tmp_path / "other", seed=1)
    saved = pool.run(_saved, model, "actor", Layout(tp=2), torch.float32, 0, tmp_path / "actor", world_size=2)
    got = pool.run(_restored, other, "actor", Layout(dp=2), torch.float32, tmp_path / "actor", world_size=2)
    expected, found = canonical([held for held, _ in saved]), canonical(got)
    assert {key.split(" ")[0] for key in found} == {"weight", "param", "average"}
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


def _offloaded(rank: int, model: Path, out: Path) -> bool:
    """Saves a role after it was onloaded; an offloaded one is refused."""
    role = make_roles(rank, {"actor": model}, {"actor": Layout()}, torch.float32)["actor"]
    train(role, 0, 1)
    role.offload()
    with pytest.raises(RuntimeError, match="the role is offloaded"):
        save(role, out / "released")
    role.onload()
    save(role, out / "actor")
    before = snapshot(role)
    train(role, 1, 1)
    restore(role, out / "actor")
    role.offload()
    role.onload()
    assert_same(before, snapshot(role))
    return True


def test_an_offloaded_role_is_not_saved(pool: RankPool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    assert pool.run(_offloaded, model, tmp_path, world_size=1) == [True]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil"),)


def _refused(rank: int, *args: Any) -> str:
    with pytest.raises(RuntimeError, match="actor cannot be restored from") as caught:
        _restored(rank, *args)
    return str(caught.value)


def test_the_state_of_another_model_is_refused(pool: RankPool, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    other = save_model(tmp_path / "other", intermediate_size=56)
    pool.run(_saved, model, "actor", Layout(), torch.float32, 1, tmp_path / "actor", world_size=1)
    layout = Layout(dp=2)
    for message in pool.run(_refused, other, "actor", layout, torch.float32, tmp_path / "actor", world_size=2):
        assert re.search(r"mlp\.\w+_proj\.weight is \[48, 32\] there, not \[56, 32\]", message)
    index = tmp_path / "actor/.metadata"
    stored = pickle.loads(index.read_bytes())
    key = next(iter(stored.state_dict_metadata))
    hostile = replace(stored, state_dict_metadata={**stored.state_dict_metadata, key: BytesStorageMetadata()})
    for content, said in ((Evil(), f"it needs {Path.__module__}.Path.touch"), (hostile, f"has '{key}', no tensor")):
        index.write_bytes(pickle.dumps(content))
        for message in pool.run(_refused, model, "actor", layout, torch.float32, tmp_path / "actor", world_size=2):
            assert said in message
    assert not Path("evil").exists()


PAGE = 4096
"""Bytes; a tmpfs has whole ones."""


def _full(rank: int, model: Path, layout: Layout, out: Path, later: bool = False) -> str:
    role = make_roles(rank, {"actor": model}, {"actor": layout}, torch.float32)["actor"]
    train(role, 0, 1)
    write = plan(role, out) if later else partial(save, role, out)
    with pytest.raises(RuntimeError, match="actor cannot be saved: ") as caught:
        write()
    return str(caught.value)


@pytest.mark.parametrize(("complete", "file"), [((), "__0_0.distcp"), (("__0_0.distcp",), "common.pt")])
def test_a_full_disk_is_named(pool: RankPool, tmp_path: Path, complete: tuple[str, ...], file: str) -> None:
    """The disk has space for the files that are complete."""
    model = save_model(tmp_path / "model")
    pool.run(_saved, model, "actor", Layout(), torch.float32, 1, tmp_path / "actor", world_size=1)
    pages = sum(-(-(tmp_path / "actor" / name).stat().st_size // PAGE) for name in complete)
    with SmallDisk(tmp_path / "disk", 4000) as disk:
        disk.fill(pages * PAGE >> 10)
        (said,) = pool.run(_full, model, Layout(), disk.path / "actor", world_size=1)
    assert re.search(rf"No space left on device \(.*0 B free\): '.*/actor/{file}'", said), said


@pytest.mark.parametrize("later", [False, True])
def test_a_write_error_of_one_rank_is_raised_on_all(pool: RankPool, tmp_path: Path, later: bool) -> None:
    model = save_model(tmp_path / "model")
    with SmallDisk(tmp_path / "disk", 400) as disk:
        disk.fill(40)
        said = pool.run(_full, model, Layout(tp=2), disk.path / "actor", later, world_size=2)
    assert said[0] == said[1]
    assert re.search(r"rank (\d): .*No space left on device \(.* KiB needed, 0 B free\): '.*/__\1_0.distcp'", said[0])
