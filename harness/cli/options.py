"""Exit statuses, options and output that several commands share."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

TYPE_CHECKING = False  # `--version` needs neither `typing` nor msgspec
if TYPE_CHECKING:
    from typing import Any, Literal

    from ...policies.policy import Policy
    from ...runner.audit.log import AuditLog, OnEntry
    from ..servers.request_log import OperatorSettings
    from ..skills.skills import Skills

    AddCommand = Callable[[str, str, Callable[..., object]], argparse.ArgumentParser]

# A copy of the names of the shipped profiles: listing their folder at every start takes time.
PROFILES = ("project", "server", "standard", "strict", "tool", "trusted-read", "workshop")
# 70 is EX_SOFTWARE of sysexits.h.
_FILES, _FILES_OR_NAMES = (
    ("audit", "find_links", "venv", "connect", "request_log", "rootfs"),
    ("packages", "policy", "python", "runtime"),
)
SUCCEEDED, FAILED, USAGE_ERROR, SANDBOX_FAILED = 0, 1, 2, 70
AUDIT_HELP = "append a record of each event to this audit trail"


def add_policy(
    parser: argparse.ArgumentParser, *, several: bool = False, default: str = "strict"
) -> None:
    """Add --policy, with `several` repeatable, and --optional."""
    text = f"a TOML file, or a profile: {', '.join(PROFILES)}; default {default}"
    if several:
        text += "; may be repeated: clients choose by name, and the first is their default"
        parser.add_argument("--policy", action="append", metavar="P", help=text)
    else:
        parser.add_argument("--policy", metavar="P", help=text)
    add_optional(parser)


def seconds(text: str) -> float:
    """Return the seconds of an option: a number, or a duration such as 10m."""
    try:
        return float(text)
    except ValueError:
        from ...policies.profiles.loading import seconds_of

        if (found := seconds_of(text)) is None:
            must = "must be a number of seconds, or a duration such as 90s or 10m"
            raise argparse.ArgumentTypeError(f"{must}, got {text!r}") from None
        return found


def mebibytes(text: str) -> float:
    """Return the MiB of an option: a number, or a size such as 2G."""
    try:
        return float(text)
    except ValueError:
        from ...policies.profiles.loading import bytes_of

        if (found := bytes_of(text)) is None:
            must = "must be a number of MiB, or a size such as 512M or 2G"
            raise argparse.ArgumentTypeError(f"{must}, got {text!r}") from None
        return found / (1024 * 1024)


def add_privacy(parser: argparse.ArgumentParser) -> None:
    """Add --privacy, which `policy_of` reads."""
    parser.add_argument(
        "--privacy", action="store_true",
        help="programs and readers of the output get tokens in place of personal data, by the rules of "
        "[privacy] in the policy, which may also enable that",
    )  # fmt: skip


def add_optional(parser: argparse.ArgumentParser) -> None:
    """Add --optional."""
    from ...policies.policy import OPTIONAL_LAYERS

    layers = ", ".join(OPTIONAL_LAYERS)
    parser.add_argument(
        "--optional", action="append", default=[], metavar="LAYER",
        help="continue without this layer if the host lacks it; may be repeated: "
        f"{layers}, or cgroup for the last three",
    )  # fmt: skip


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """Add --gpu, which `policy_of` reads."""
    parser.add_argument(
        "--gpu", action="store_true",
        help="show programs the NVIDIA GPUs of this host, whose driver in the kernel is trusted then, "
        "and raise limits to what these need; devices.gpu of a policy names single ones",
    )  # fmt: skip


def add_subcommands(
    parser: argparse.ArgumentParser, add_common: Callable[[argparse.ArgumentParser], None]
) -> "AddCommand":
    """Let `parser` have commands of its own, each with the common options; return the function that
    adds one, which sets `action`."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, summary: str, action: Callable[..., object]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.set_defaults(action=action)
        add_common(command)
        return command

    return add


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add --backend, --runtime and --rootfs."""
    parser.add_argument(
        "--backend", choices=("cells", "oci"),
        help="oci: run cells inside a container that an OCI runtime makes; default cells, without one",
    )  # fmt: skip
    parser.add_argument(
        "--runtime",
        metavar="R",
        help="with --backend oci: crun, runc, youki, runsc, krun, or a path; default the first of "
        "crun, runc and youki that this host's cgroups permit",
    )
    parser.add_argument(
        "--rootfs", metavar="DIR",
        help="with --backend oci: programs see the files of this root file system; default the host's",
    )  # fmt: skip


def workers(text: str) -> "int | Literal['auto']":
    """Return the number of workers, for argparse."""
    return "auto" if text == "auto" else int(text)


def add_workers(parser: argparse.ArgumentParser, of: str = "") -> None:
    """Add --workers."""
    whose = f" {of}" if of else ""
    parser.add_argument(
        "--workers", type=workers, default=1, metavar="N",
        help=f"processes that make the cells{whose}, for hosts with many processors, or auto: one for "
        "every two processors; default 1, the process of this command",
    )  # fmt: skip


def add_image(parser: argparse.ArgumentParser) -> None:
    """Add --image, which `image_of` and `policy_of` read."""
    parser.add_argument(
        "--image", metavar="REF",
        help="programs see the files of this image, and may change them as root: a name, or the "
        "path of a layout, tar or directory; default none. The policy is workshop by default",
    )  # fmt: skip


def image_of(options: argparse.Namespace) -> "dict[str, Any]":
    """Return the argument of `Sandbox` that --image gives, if any; raises PolicyError."""
    if options.image is None:
        return {}
    if getattr(options, "backend", None) == "oci":
        from ...policies.errors import PolicyError

        raise PolicyError("--image: cannot be combined with --backend oci")
    return {"image": options.image}


def backend_of(options: argparse.Namespace) -> "dict[str, Any]":
    """Return the arguments of `Sandbox` that the options of `add_backend` name.

    Raises PolicyError for an option that needs containers.
    """
    from ...policies.errors import PolicyError

    if options.backend != "oci":
        for name in ("runtime", "rootfs"):
            if getattr(options, name) is not None:
                raise PolicyError(f"--{name}: needs --backend oci")
    names = "backend", "runtime", "rootfs"
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def backend_of_server(options: argparse.Namespace) -> "dict[str, Any]":
    """Do what `backend_of` does for a command that offers sessions and tools.

    Raises PolicyError for a runtime whose containers run single calls, and LaunchError if the host
    lacks the runtime.
    """
    given = backend_of(options)
    if options.backend == "oci":
        from ..sandbox.containers.images import check_holds_sessions

        check_holds_sessions(options.runtime)
    return given


def add_json(parser: argparse.ArgumentParser, kind: str = "array") -> None:
    """Add --json; `kind` names the JSON value that is printed."""
    parser.add_argument("--json", action="store_true", help=f"print one JSON {kind}")


def add_skills(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --skills; `what` completes its help: the use of the skills."""
    parser.add_argument(
        "--skills", action="append", nargs="?", const="", metavar="DIR",
        help=f"{what} the trusted skills below this folder, and those that are kept; without DIR those "
        "below .agents/skills here and in your home; may be repeated",
    )  # fmt: skip


def skills_of(options: argparse.Namespace) -> "Skills | None":
    """Return the skills that --skills names; None without it."""
    if options.skills is None:
        return None
    from ..skills.skills import Skills

    return Skills([each for each in options.skills if each] or None)


def policy_of(options: argparse.Namespace) -> "Policy":
    """Return the policy that the options of `add_policy` name; raises PolicyError."""
    return policy_named(options.policy, options)


def policy_named(name: str | None, options: argparse.Namespace) -> "Policy":
    """Return the policy `name`, default strict, with the layers that --optional names."""
    import msgspec

    from ...policies.policy import Policy, named_layers

    policy = Policy(name="strict")
    if not name and getattr(options, "image", None):
        name = "workshop"  # a strict policy executes no program of an image
    if name:
        from ...policies.profiles.loading import load_policy

        policy = load_policy(name)
    chosen = named_layers("--optional", options.optional)
    policy = msgspec.structs.replace(policy, optional_layers=(*policy.optional_layers, *chosen))
    if getattr(options, "gpu", False):
        from ...policies.compiling.gpus import with_gpu

        policy = with_gpu(policy, True)
    if getattr(options, "privacy", False):
        privacy = msgspec.structs.replace(policy.privacy, enabled=True)
        policy = msgspec.structs.replace(policy, privacy=privacy)
    return policy


def words_of(options: argparse.Namespace, leave_out: Sequence[str]) -> list[str]:
    """Return the options that were given, for another process that has another working directory, so
    paths become absolute.  `options.parser` is their parser; `leave_out` names options."""
    words = []
    for action in options.parser._actions:
        value: Any = getattr(options, action.dest, None)
        if action.dest in ("help", *leave_out) or value == action.default:
            continue
        if value is True:
            words.append(action.option_strings[-1])
            continue
        for each in value if isinstance(value, list) else [value]:
            is_file = _is_file(action.dest, each)
            words += [action.option_strings[-1], os.path.abspath(each) if is_file else str(each)]
    return words


def _is_file(option: str, value: "Any") -> bool:
    if option == "metrics":
        return "/" in value
    if option == "image":
        return value[:1] in ("/", ".")
    if option in _FILES_OR_NAMES:
        return os.path.exists(value)
    return option in _FILES and value != "-"


@contextlib.contextmanager
def audit_of(
    options: argparse.Namespace, on_entry: "OnEntry | None" = None
) -> Iterator["AuditLog | None"]:
    """Open the trail that --audit names; without it import nothing of the audit package.

    With `on_entry`, which is called with each record, there is always a trail.

    The log keeps no entries in memory: a command has no way to ask for them, and a daemon would keep
    up to 20 MiB of them.
    """
    if options.audit is None and on_entry is None:
        yield None
        return
    from ...runner.audit.log import AuditLog

    with AuditLog(0, on_entry, path=options.audit) as log:
        yield log


def print_json(value: "Any", indent: int = 0) -> None:
    """Print `value` as JSON; hidden characters, which could deceive a person, are escaped."""
    import json

    import msgspec

    from ..text.hidden import replace_hidden

    encoded = msgspec.json.encode(value)
    text = msgspec.json.format(encoded, indent=indent).decode() if indent else encoded.decode()
    sys.stdout.write(replace_hidden(text, lambda character: json.dumps(character)[1:-1]) + "\n")


def add_health(parser: argparse.ArgumentParser) -> None:
    """Add --health."""
    parser.add_argument(
        "--health", metavar="ADDRESS",
        help="answer only /healthz and /readyz at HOST:PORT, or at this path of a socket, to everyone, "
        "for load balancers (extra web); default off",
    )  # fmt: skip


def add_operations(parser: argparse.ArgumentParser) -> None:
    """Add --metrics, --health, --request-log and --otel."""
    parser.add_argument(
        "--metrics", metavar="ADDRESS",
        help="answer /metrics (Prometheus), /healthz and /readyz at HOST:PORT, or at this path of a "
        "socket (extra metrics)",
    )  # fmt: skip
    add_health(parser)
    parser.add_argument(
        "--request-log", metavar="FILE",
        help="append a line of JSON for each request to this file, - for stderr",
    )  # fmt: skip
    parser.add_argument(
        "--otel", action="store_true",
        help="send spans and metrics by OTLP, as OTEL_EXPORTER_OTLP_ENDPOINT says (extra otlp)",
    )  # fmt: skip


def operations_of(options: argparse.Namespace) -> "OperatorSettings":
    """Return what the options of `add_operations` and --audit ask for."""
    from ..servers.request_log import OperatorSettings

    return OperatorSettings(
        options.audit, options.metrics, options.request_log, options.otel, options.health
    )
