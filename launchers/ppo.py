"""One run of any stage as an experiment: ``python -m launchers.ppo configs/debug/ppo.yaml``."""

from __future__ import annotations

from launchers.submission import make_app

app = make_app("Run CONFIG as an experiment of NeMo-Run, here or on a cluster.", chain=False)

if __name__ == "__main__":
    app()
