"""A program whose workers leave things behind, until a signal ends it."""

from __future__ import annotations

import signal
import tempfile
import time
from pathlib import Path

from megarl.cluster.session import Session
from megarl.config import load
from megarl.groups.trainers import launch_group
from tests.cluster.conftest import DEBUG, TWO, answer_of
from tests.cluster.fakes import FakeWorker


def main() -> None:
    # A shell starts its background jobs with SIGINT ignored, and the tests may run in one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = load(DEBUG, TWO)
    with Session(config.cluster, Path(tempfile.gettempdir()) / "logs") as session:
        group = launch_group(session, config, "train", FakeWorker)
        names = session.run(answer_of(lambda: group.call(FakeWorker.litter)))
        print(*names, flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
