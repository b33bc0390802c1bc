"""Device lists as people write them: ``0-3`` or ``0,1,4-5``."""

from __future__ import annotations

import re

_PART = re.compile(r"(\d+)(?:-(\d+))?")


def parse_devices(text: str) -> tuple[int, ...]:
    """The device numbers that a list names, in its order; numbers count over all nodes from 0.

    Raises:
        ValueError: a part that is neither a number nor a rising range, or a device named twice.
    """
    devices: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part.strip()!r} is neither a device number nor a range such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} runs backwards")
        devices.extend(range(first, last + 1))
    if len(set(devices)) < len(devices):
        raise ValueError(f"{text!r} names a device twice")
    return tuple(devices)
