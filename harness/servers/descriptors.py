"""How many descriptors a server of ours may have open."""

import resource

_WANTED = 65_536


def allow_descriptors() -> None:
    """Raise our soft RLIMIT_NOFILE as far as the hard one allows: a cell takes a dozen descriptors, a
    connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
