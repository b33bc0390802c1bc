"""Which ranks are in which group, against Megatron's own generator of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.types import Layout

ORDER = "tp-cp-ep-dp-pp"
DENSE = {("tp",): "tp", ("dp",): "dp", ("pp",): "pp", ("tp", "pp"): "tp-pp", ("tp", "dp"): "tp-dp"}
EXPERT = {("ep",): "ep", ("expt_dp",): "dp", ("tp", "ep"): "tp-ep", ("tp", "ep", "pp"): "tp-ep-pp"}
"""By the coordinates in which the ranks of a group differ, as Megatron writes them."""


def _megatrons(tp: int, ep: int, dp: int, pp: int) -> Any:
    from megatron.core.parallel_state import RankGenerator

    return RankGenerator(tp=tp, ep=ep, dp=dp, pp=pp, cp=1, order=ORDER)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of what Megatron imports
@pytest.mark.parametrize("layout", [Layout(tp=2, dp=4, pp=3, ep=2), Layout(tp=3, dp=4, ep=4), Layout(dp=2, pp=2)])
def test_groups_equal_megatrons(layout: Layout) -> None:
    from megarl.megatron.parallel import partition

    dense = _megatrons(layout.tp, 1, layout.dp, layout.pp)
    expert = _megatrons(layout.tp, layout.ep, layout.dp // layout.ep, layout.pp)
    for generator, names in ((dense, DENSE), (expert, EXPERT)):
        for ours, theirs in names.items():
            assert sorted(partition(layout, *ours)) == sorted(map(tuple, generator.get_ranks(theirs))), ours


def test_ep_must_divide_dp() -> None:
    with pytest.raises(ValueError, match="ep 2 does not divide dp 3"):
        Layout(dp=3, ep=2)
