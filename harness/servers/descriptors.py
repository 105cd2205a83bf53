"""The limit of open file descriptors of a server process."""

import resource

_WANTED = 65_536


def allow_descriptors() -> None:
    """Raise the soft RLIMIT_NOFILE to 65,536, or the hard limit if that is lower: a cell takes a dozen
    descriptors, a connection one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
