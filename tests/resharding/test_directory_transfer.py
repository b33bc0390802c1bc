"""The example of a user's way: a directory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.resharding import connect
from tests.resharding import jobs
from tests.resharding.ways import Connections

CONNECTIONS = Connections()
DIRECTORY = "examples.directory_transfer:DirectoryTransfer"


def loaded(transport: str) -> list[dict[str, torch.Tensor]]:
    """What the ranks have loaded after two syncs, of other weights each."""
    spec = CONNECTIONS(jobs.transfer_plan(512, "bfloat16"), transport=transport, timeout_s=30.0)

    def rank(index: int) -> dict[str, torch.Tensor]:
        me = jobs.Rank(spec, index)
        me.sync(1)
        for tensor in me.params.values():
            tensor.mul_(3)
        stats = me.sync(2)
        assert stats.version == 2, stats
        assert not me.connection.ways.get(True) or me.put.total() == 0
        me.connection.close()
        return me.loaded

    with ThreadPoolExecutor(jobs.RANKS) as ranks:
        return list(ranks.map(rank, range(jobs.RANKS)))


def test_a_directory_brings_the_bits_that_shared_memory_brings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shared = loaded("shared_memory")
    through_files = loaded(DIRECTORY)
    assert sum(map(len, shared)) > 0
    for expected, found in zip(shared, through_files, strict=True):
        assert list(found) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert list((tmp_path / "transfers").iterdir()) == []


def test_a_class_that_is_no_way_aborts_the_connection() -> None:
    spec = CONNECTIONS(jobs.transfer_plan(), transport="examples.directory_transfer:Path")
    with ThreadPoolExecutor(jobs.RANKS) as ranks:
        for attempt in [ranks.submit(connect, spec.only([rank]), rank) for rank in range(jobs.RANKS)]:
            with pytest.raises(RuntimeError, match=r"could not connect: .*derived from .*WeightTransfer"):
                attempt.result()
