"""Whether a process runs a run, as far as this machine can see."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock of a run's directory; None where nobody can say.

    On a file system that machines share, a lock may be seen on the machine that holds it alone: True is certain, and
    False is so where the process would be on this machine.

    Args:
        path: of the lock. It is taken for an instant, together with others who look.
    """
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # it may not be read, or the file system has no locks
        return None
    return False
