"""The node agent, with the same command line, and a scripted driver in place of ``megarl``."""

from __future__ import annotations

import logging
import sys

from megarl.launch.node.__main__ import run_agent
from megarl.launch.node.agent import AgentOptions

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    _, limit, command, config, *overrides = sys.argv[1:]
    options = AgentOptions(
        program=(sys.executable, "-m", "tests.launch.node_driver"),
        command=command,
        config=config,
        overrides=tuple(overrides),
        interface=None,
        start_limit_s=float(limit),
    )
    sys.exit(run_agent(options))
