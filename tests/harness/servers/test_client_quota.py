"""`ClientQuota`: what one client, and all together, may have at once."""

import pytest

from cellwright.harness.servers.client_quota import ClientQuota
from cellwright.policies.errors import BusyError


def test_a_client_is_refused_beyond_its_limit_and_all_beyond_theirs() -> None:
    quota = ClientQuota("bytes", per_client=20, total=30, hint="send less")
    with quota.held("ann", 20):
        with pytest.raises(BusyError, match="bytes: at most 20 for each client\nhint: send less"):
            quota.take("ann")
        with quota.held("bob", 10), pytest.raises(BusyError, match="at most 30 for all clients"):
            quota.take("cat")
        with quota.held("cat", 10):
            pass
    with quota.held("ann", 20):
        pass


def test_a_client_that_holds_nothing_is_forgotten() -> None:
    """Otherwise a daemon would keep an entry for every process that ever connected."""
    quota = ClientQuota("connections", per_client=1, total=1)
    with quota.held("ann"), pytest.raises(BusyError):
        quota.take("bob")
    quota.take("bob", 0)
    quota.give_back("bob", 0)
    assert not quota._held
