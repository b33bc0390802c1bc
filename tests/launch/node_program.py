"""The node agent, with a scripted driver in place of ``megarl``."""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

from megarl.launch.node import __main__ as agent

if __name__ == "__main__":
    driver = partial(agent.AgentOptions, program=(sys.executable, "-m", "tests.launch.node_driver"))
    with patch.object(agent, "AgentOptions", driver):
        agent.app()
