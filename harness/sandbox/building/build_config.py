"""The instructions of a Dockerfile that change only the configuration of an image."""

import posixpath
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from ..images.image import ImageConfig
from .dockerfile import Instruction

DEFAULT_SHELL = ("/bin/sh", "-c")


def configured(
    config: ImageConfig, given: Instruction, expanded: Callable[[str], str]
) -> ImageConfig:
    """Return the configuration after an instruction; raises ValueError, KeyError for an instruction of
    another kind."""
    return _CHANGES[given.keyword](config, given, expanded)


def environment_of(config: ImageConfig) -> dict[str, str]:
    return dict(each.split("=", 1) for each in config.env if "=" in each)


def with_variables(config: ImageConfig, variables: Mapping[str, str]) -> ImageConfig:
    told = {**environment_of(config), **variables}
    return replace(config, env=tuple(f"{name}={value}" for name, value in told.items()))


def command_of(config: ImageConfig, given: Instruction) -> tuple[str, ...]:
    """Return the command line of RUN, CMD or ENTRYPOINT, of its shell form with the shell."""
    return given.words if given.is_exec else (*(config.shell or DEFAULT_SHELL), *given.words)


def pairs_of(given: Instruction, expanded: Callable[[str], str]) -> dict[str, str]:
    words = [expanded(each) for each in given.words]
    return dict(zip(words[::2], words[1::2], strict=True))


def directory_of(config: ImageConfig, path: str) -> str:
    """Return an absolute path: `path` below the working directory."""
    return posixpath.normpath(posixpath.join("/", config.working_dir, path)).replace("//", "/")


def _env(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    return with_variables(config, pairs_of(given, expanded))


def _label(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    return replace(config, labels={**config.labels, **pairs_of(given, expanded)})


def _maintainer(config: ImageConfig, given: Instruction, _: Callable[[str], str]) -> ImageConfig:
    return replace(config, labels={**config.labels, "maintainer": given.words[0]})


def _user(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    return replace(config, user=expanded(given.words[0]))


def _command(config: ImageConfig, given: Instruction, _: Callable[[str], str]) -> ImageConfig:
    return replace(config, cmd=command_of(config, given))


def _entrypoint(config: ImageConfig, given: Instruction, _: Callable[[str], str]) -> ImageConfig:
    return replace(config, entrypoint=command_of(config, given))


def _shell(config: ImageConfig, given: Instruction, _: Callable[[str], str]) -> ImageConfig:
    return replace(config, shell=given.words)


def _stop(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    return replace(config, stop_signal=expanded(given.words[0]))


def _volume(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    named = [expanded(each) for each in given.words]
    return replace(config, volumes=tuple(dict.fromkeys((*config.volumes, *named))))


def _expose(config: ImageConfig, given: Instruction, expanded: Callable[[str], str]) -> ImageConfig:
    ports = list(config.exposed_ports)
    for word in expanded(given.words[0]).split():
        port, slash, protocol = word.lower().partition("/")
        first, dash, last = port.partition("-")
        if protocol not in ("", "tcp", "udp", "sctp") or (slash and not protocol):
            raise ValueError(f"EXPOSE: must be PORT, FIRST-LAST or PORT/udp, got {word[:80]!a}")
        numbers = [int(each) if each.isdigit() else 0 for each in (first, last if dash else first)]
        if not 0 < numbers[0] <= numbers[1] <= 65535:
            raise ValueError(f"EXPOSE: invalid port {word[:80]!a}")
        ports += [f"{each}/{protocol or 'tcp'}" for each in range(numbers[0], numbers[1] + 1)]
    return replace(config, exposed_ports=tuple(dict.fromkeys(ports)))


_CHANGES = {
    "ENV": _env, "LABEL": _label, "MAINTAINER": _maintainer, "USER": _user, "CMD": _command,
    "ENTRYPOINT": _entrypoint, "SHELL": _shell, "STOPSIGNAL": _stop, "VOLUME": _volume,
    "EXPOSE": _expose,
}  # fmt: skip
