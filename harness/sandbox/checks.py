"""Checks of arguments of `Sandbox` and of calls, apart from those of a policy."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import interpreted_languages, language_called, language_names
from ...policies.policy import Limits, check_limit
from ...runner.settings import MOST_BRANCHES, PauseSettings, PoolSettings, SessionSettings

if TYPE_CHECKING:
    from ...policies.languages.table import LanguageTable

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MOST_WORKERS = 256
MAX_FILES = 20_000  # the host lists at most so many files of a workspace


def check_flag(name: str, value: object) -> bool:
    """Return `value`; raises PolicyError unless it is True or False."""
    if not isinstance(value, bool):
        raise PolicyError(f"{name}: must be True or False, got {value!r}")
    return value


def check_whole(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return `value`; raises PolicyError unless it is a whole number from `least` to `most`."""
    if (
        not isinstance(value, int) or isinstance(value, bool)
        or value < least or (most is not None and value > most)
    ):  # fmt: skip
        bounds = f"from {least}" + ("" if most is None else f" to {most}")
        raise PolicyError(f"{name}: must be a whole number {bounds}, got {value!r}")
    return value


def check_branches(n: object) -> int:
    """Return `n`; raises PolicyError for an invalid number of branches."""
    return check_whole("n", n, 1, MOST_BRANCHES)


def check_host_path(name: str, path: object) -> str:
    """Return a path of the host as text; raises PolicyError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise PolicyError(f"{name}: must be a path, got {path!r}")
    return os.fspath(path)


def with_timeout(
    limits: Limits, seconds: float | None, name: str = "timeout", limit: str = "wall_seconds"
) -> Limits:
    """Return `limits` with a time of `seconds`, by default of wall time; `name` is the caller's name
    for it.

    Raises PolicyError if that is more than the limits allow: a call can only lower a limit.
    """
    if seconds is None:
        return limits
    check_limit(name, seconds, limit=limit)
    most = getattr(limits, limit)
    if seconds > most:
        raise PolicyError(
            f"{name}: {seconds:g} s is more than limits.{limit} of the policy, {most:g} s",
            f"a call can only lower a limit: raise timeout_seconds of SandboxConfig, or {limit} "
            "below [limits] in a policy file",
        )
    return msgspec.structs.replace(limits, **{limit: float(seconds)})


def check_sessions(settings: SessionSettings) -> SessionSettings:
    """Return `settings`; raises PolicyError naming an invalid one."""
    if not isinstance(settings, SessionSettings):
        raise PolicyError(f"sessions: must be SessionSettings, got {settings!r}")
    check_flag("sessions.evict", settings.evict)
    for name, value in settings._asdict().items():
        if name != "evict" and (value is not None or name not in ("pause_seconds", "memory_bytes")):
            check_limit(f"sessions.{name}", value, whole=not name.endswith("seconds"))
    if settings.alive < 1 or settings.requests < 1:
        raise PolicyError("sessions.alive and sessions.requests must be at least 1")
    return settings


def worker_count(workers: object) -> int:
    """Return how many workers a sandbox has; raises PolicyError for an invalid number."""
    if workers == "auto":
        return max(1, len(os.sched_getaffinity(0)) // 2)
    if isinstance(workers, str):
        raise PolicyError(f'workers: must be a whole number or "auto", got {workers!r}')
    return check_whole("workers", workers, 1, _MOST_WORKERS)


def check_interpreters(paths: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """Return `paths`, language to interpreter, if each can be executed; raises PolicyError."""
    if not isinstance(paths, Mapping):
        raise PolicyError(f"interpreters: must be a mapping, got {type(paths).__name__}")
    known = interpreted_languages()
    checked = {}
    for language, path in paths.items():
        if language not in known:
            raise PolicyError(f"interpreters: {language!r} must be one of {', '.join(known)}")
        if not (isinstance(path, str | os.PathLike) and os.path.isabs(path)):
            raise PolicyError(f"interpreters.{language}: {path!r} is not an absolute path")
        if not (os.path.isfile(path) and os.access(path, os.X_OK)):
            raise PolicyError(f"interpreters.{language}: {path} cannot be executed")
        checked[language] = os.fspath(path)
    return checked


def check_pool(pool: int | PoolSettings) -> PoolSettings:
    """Return the settings of the pool, of which `pool` may be the `size` alone; raises PolicyError
    naming an invalid one."""
    if not isinstance(pool, int | PoolSettings):
        raise PolicyError(f"pool: must be a whole number or PoolSettings, got {pool!r}")
    settings = pool if isinstance(pool, PoolSettings) else PoolSettings(size=pool)
    for name, value in settings._asdict().items():
        check_limit(f"pool.{name}", value, whole=not name.endswith("seconds"))
    for name in (
        "running",
        "programs",
        "cells_per_launcher",
        "cells_per_network",
        "cells_per_cgroup",
    ):
        if getattr(settings, name) < 1:
            raise PolicyError(f"pool.{name} must be at least 1")
    return settings


def check_language(
    name: str, where: str = "language", *, table: "LanguageTable | None" = None
) -> str:
    """Return the language that is called `name`, one with sessions, or also one of `table`.

    Raises PolicyError, which names the parameter `where`, if there is none.
    """
    if found := language_called(name):
        return found
    from ...policies.argument_checks import did_you_mean  # only for errors

    if table and (entry := table.called(name)):
        return entry.name
    known = (*language_names(), *(table.names() if table else ()))
    hint = did_you_mean(name, known, f"use one of {', '.join(known)}")
    raise PolicyError(f"{where}: unknown language {name!r}", hint)


def check_user(user: int | str | None) -> int | str | None:
    """Return the user of cells; raises PolicyError for one that this process cannot start cells as."""
    known = isinstance(user, str) or (isinstance(user, int) and not isinstance(user, bool))
    if user is not None and (not known or not user or (isinstance(user, int) and user < 0)):
        raise PolicyError(f"user: must be a number above 0 or a name, got {user!r}")
    if isinstance(user, int) and os.geteuid() not in (0, user):
        raise PolicyError(f"user: only root can start cells as another user, got {user}")
    return user


def check_pause_settings(given: PauseSettings) -> PauseSettings:
    """Return `given`; raises PolicyError naming an invalid setting."""
    if given == PauseSettings():
        return given
    from .sessions.state_file import check_pauses  # seldom needed

    return check_pauses(given)


def unknown_parameter(what: str, given: Iterable[str], known: Sequence[str]) -> TypeError:
    """Return the error for the first name of `given` that `what` does not take; it names the parameter
    that was probably meant."""
    from ...policies.argument_checks import did_you_mean  # only for errors

    name = next((each for each in given if each not in known), "")
    hint = did_you_mean(name, known, f"it takes {', '.join(known)}")
    return TypeError(f"{what}: unknown argument {name!r}; {hint}")


def suggests_parameters(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let an unknown keyword raise a TypeError that names the parameter that was probably meant."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> _T:
        if named.keys() - set(known):
            what = function.__qualname__.removesuffix(".__init__")
            raise unknown_parameter(what, named, [each for each in known if each != "self"])
        return function(*arguments, **named)

    return checked


def suggests_fields(cls: type[_T]) -> type[_T]:
    """Let an unknown field of a dataclass raise a TypeError as `suggests_parameters` does."""
    cls.__init__ = suggests_parameters(cls.__init__)  # type: ignore[method-assign]
    return cls
