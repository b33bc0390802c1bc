"""Memory of processes from outside: the proportional set size, in which what several share is counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

_INTERVAL_S = 0.01


def pss(pid: int) -> int:
    """Bytes of a process."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))


class Watch:
    """Looks at processes until it is stopped; how much each had more, at most, than when it began."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._before = {pid: pss(pid) for pid in pids}
        self.peak = dict(self._before)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.is_set():
            for pid in self.peak:
                self.peak[pid] = max(self.peak[pid], pss(pid))
            time.sleep(_INTERVAL_S)

    def stop(self) -> dict[int, int]:
        """Bytes by process."""
        self._stopped.set()
        self._thread.join()
        return {pid: self.peak[pid] - before for pid, before in self._before.items()}
