"""Terminals of a tenant with quotas."""

import os
from pathlib import Path

import pytest

from cellwright import Sandbox
from cellwright.errors import QuotaExceeded
from tests.conftest import soon
from tests.harness.servers.daemon.configured import configured

pytestmark = pytest.mark.needs("userns")


def test_a_terminal_counts_as_a_call_while_it_is_open(tmp_path: Path) -> None:
    """Else a tenant would run as many programs as it opens terminals, whatever its quotas."""
    text = f"""
policies = ["workshop"]
socket_group = {os.getegid()}
[[tenants]]
name = "ours"
users = [{os.geteuid()}]
calls = 1
queue = 0
"""
    with (
        configured(tmp_path, text) as daemon,
        daemon.sandbox("workshop") as sandbox,
        sandbox.session() as session,
    ):
        with session.terminal(["cat"]), pytest.raises(QuotaExceeded) as refused:
            sandbox.execute("1")
        assert refused.value.limit == "queue"
        assert soon(lambda: _is_free(sandbox))


def _is_free(sandbox: Sandbox) -> bool:
    try:
        return sandbox.execute("1").ok
    except QuotaExceeded:
        return False
