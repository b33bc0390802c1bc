"""Shares of equal cost and packs of bounded cost.

An item is what stays together: one row or, of a preference pair, two. Its cost is its tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def spread(items: Sequence[T], shares: int, cost: Callable[[T], int]) -> list[list[T]]:
    """Gives each item, the dearest first, to the share that costs least so far; ties go to the first share."""
    dealt: list[list[T]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for item in sorted(items, key=cost, reverse=True):
        load, share = loads[0]
        dealt[share].append(item)
        heapq.heapreplace(loads, (load + cost(item), share))
    return dealt


def deal(items: Sequence[T], shares: int, cost: Callable[[T], int]) -> list[list[T]]:
    """Deals in rounds, one item to every share, the dearest of a round to the share that costs least so far.

    The numbers of items in the shares differ by at most one.
    """
    dealt: list[list[T]] = [[] for _ in range(shares)]
    loads = [0] * shares
    dearest_first = sorted(items, key=cost, reverse=True)
    for start in range(0, len(items), shares):
        emptiest_first = sorted(range(shares), key=lambda share: loads[share])
        for item, share in zip(dearest_first[start : start + shares], emptiest_first, strict=False):
            dealt[share].append(item)
            loads[share] += cost(item)
    return dealt


def packed(shares: Sequence[Sequence[T]], unit: int, capacity: int, cost: Callable[[T], int]) -> list[list[list[T]]]:
    """Packs the items of every share, each into one number of packs.

    Args:
        shares: items, none dearer than ``capacity``.
        unit: what the number of packs is a multiple of; it is the least that fits.
        capacity: most that a pack may cost. Packs are levelled as far as it allows.

    Returns:
        By share, its packs; some are empty where another share needs more.
    """
    fitted = [_first_fit(items, capacity, cost) for items in shares]
    count = -(-max(map(len, fitted)) // unit) * unit
    return [_levelled(items, tight, count, capacity, cost) for items, tight in zip(shares, fitted, strict=True)]


def _levelled(
    items: Sequence[T], tight: list[list[T]], count: int, capacity: int, cost: Callable[[T], int]
) -> list[list[T]]:
    """``count`` packs of about equal cost or, where one would overflow, the tight ones and empty ones."""
    level = spread(items, count, cost)
    if max(sum(map(cost, pack)) for pack in level) <= capacity:
        return level
    return tight + [[] for _ in range(count - len(tight))]


def _first_fit(items: Sequence[T], capacity: int, cost: Callable[[T], int]) -> list[list[T]]:
    """First-fit decreasing: the dearest item first, each into the first pack that has room."""
    packs: list[list[T]] = []
    room: list[int] = []
    for item in sorted(items, key=cost, reverse=True):
        index = next((i for i, free in enumerate(room) if free >= cost(item)), len(packs))
        if index == len(packs):
            packs.append([])
            room.append(capacity)
        packs[index].append(item)
        room[index] -= cost(item)
    return packs
