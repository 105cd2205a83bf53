"""Checks of arguments of `Sandbox` and of calls, apart from those of a policy."""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

import msgspec

from ...policies.errors import PolicyError
from ...policies.languages import interpreted_languages, language_called, language_names
from ...policies.policy import Limits, check_limit
from ...runner.settings import MOST_BRANCHES, PauseSettings, PoolSettings, SessionSettings

_P = ParamSpec("_P")
_T = TypeVar("_T")
MAX_FILES = 20_000  # the host lists as many of a workspace


def check_flag(name: str, value: object) -> bool:
    """Return `value`; raises PolicyError unless it is True or False."""
    if not isinstance(value, bool):
        raise PolicyError(f"{name}: must be True or False, got {value!r}")
    return value


def check_branches(n: object) -> int:
    """Return `n`; raises PolicyError for an invalid number of branches."""
    if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MOST_BRANCHES:
        raise PolicyError(f"n: must be a whole number from 1 to {MOST_BRANCHES}, got {n!r}")
    return n


def check_host_path(name: str, path: object) -> str:
    """Return a path of the host as text; raises PolicyError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise PolicyError(f"{name}: must be a path, got {path!r}")
    return os.fspath(path)


def with_timeout(limits: Limits, seconds: float | None, name: str = "timeout") -> Limits:
    """Return `limits` with a wall time of `seconds`; `name` is the caller's name for it.

    Raises PolicyError if that is more than the limits allow: a call can only lower a limit.
    """
    if seconds is None:
        return limits
    check_limit(name, seconds, limit="wall_seconds")
    if seconds > limits.wall_seconds:
        raise PolicyError(
            f"{name}: {seconds:g} s is more than limits.wall_seconds of the policy, "
            f"{limits.wall_seconds:g} s",
            "a call can only lower a limit: raise timeout_seconds of SandboxConfig, or wall_seconds "
            "below [limits] in a policy file",
        )
    return msgspec.structs.replace(limits, wall_seconds=float(seconds))


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


def check_pool(pool: int | PoolSettings, *, fresh_exec: bool) -> PoolSettings:
    """Return the settings of the pool, with a launcher for every cell if `fresh_exec`.

    `pool` may be their `size` alone.  Raises PolicyError naming an invalid one.
    """
    if not isinstance(pool, int | PoolSettings):
        raise PolicyError(f"pool: must be a whole number or PoolSettings, got {pool!r}")
    settings = pool if isinstance(pool, PoolSettings) else PoolSettings(size=pool)
    if check_flag("fresh_exec", fresh_exec):
        settings = settings._replace(cells_per_launcher=1)
    for name, value in settings._asdict().items():
        check_limit(f"pool.{name}", value, whole=not name.endswith("seconds"))
    for name in ("running", "programs", "cells_per_launcher", "cells_per_network"):
        if getattr(settings, name) < 1:
            raise PolicyError(f"pool.{name} must be at least 1")
    return settings


def check_language(name: str) -> str:
    """Return the language that is called `name`; raises PolicyError if there is none."""
    if found := language_called(name):
        return found
    from ...policies.similar import did_you_mean  # only for errors

    names = ", ".join(language_names())
    hint = did_you_mean(name, language_names(), f"use one of {names}")
    raise PolicyError(f"language: unknown language {name!r}", hint)


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
    from .pausing.pauses import check_pauses  # seldom needed

    return check_pauses(given)


def suggests_parameters(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let an unknown keyword raise a TypeError that names the parameter that was probably meant."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> _T:
        for name in named.keys() - set(known):
            what = function.__qualname__.removesuffix(".__init__")
            names = [each for each in known if each != "self"]
            from ...policies.similar import did_you_mean  # only for errors

            hint = did_you_mean(name, names, f"it takes {', '.join(names)}")
            raise TypeError(f"{what}: unknown argument {name!r}; {hint}")
        return function(*arguments, **named)

    return checked


def suggests_fields(cls: type[_T]) -> type[_T]:
    """Let an unknown field of a dataclass raise a TypeError as `suggests_parameters` does."""
    cls.__init__ = suggests_parameters(cls.__init__)  # type: ignore[method-assign]
    return cls
