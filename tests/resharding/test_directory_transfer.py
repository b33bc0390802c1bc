"""The example of a user's way: a directory."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megarl.resharding import Connection, connect
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


def do_not_write(connection: Connection) -> None:
    connection.ways[False].send = lambda *_: None


def send_another_version(connection: Connection) -> None:
    notify = connection.notify
    connection.notify = lambda peer, tag, numbers, what: notify(peer, tag, [7, *numbers[1:]], what)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (do_not_write, r"rank 0: model\..* 0 of \d+ bytes were written"),
        (send_another_version, r"rank 0 delivered version 7, bucket 0 for model\..*; planned was version 1"),
    ],
)
def test_a_sender_that_does_not_keep_to_the_plan_aborts_the_sync(
    change: Callable[[Connection], None], error: str
) -> None:
    spec = CONNECTIONS(jobs.transfer_plan(), timeout_s=30.0, verify=False)

    def rank(index: int) -> tuple[str, float]:
        me = jobs.Rank(spec, index)
        if index == 0:
            change(me.connection)
        return me.sync(1)

    with ThreadPoolExecutor(jobs.RANKS) as ranks:
        for told, _ in ranks.map(rank, range(jobs.RANKS)):
            assert re.search(error, told), told


def test_a_class_that_is_no_way_aborts_the_connection() -> None:
    spec = CONNECTIONS(jobs.transfer_plan(), transport="examples.directory_transfer:Path")
    with ThreadPoolExecutor(jobs.RANKS) as ranks:
        for attempt in [ranks.submit(connect, spec.only([rank]), rank) for rank in range(jobs.RANKS)]:
            with pytest.raises(RuntimeError, match=r"could not connect: .*derived from .*WeightTransfer"):
                attempt.result()
