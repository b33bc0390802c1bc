"""The Ray cluster and the fake workers of tests/cluster, for the groups that stand on them."""

from tests.cluster.conftest import (
    config,
    drop_broken_calls,
    group,
    make_group,
    pytest_pyfunc_call,
    session,
)

__all__ = ["config", "drop_broken_calls", "group", "make_group", "pytest_pyfunc_call", "session"]
