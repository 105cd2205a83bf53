"""`cellwright tools`: making, calling and looking at the tools in a registry."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...policies.errors import PolicyError, ToolError, ToolFailed, ToolResultInvalid
from ...policies.permissions import FilePermission, PermissionLevel, PermissionSet
from ...policies.policy import Policy
from ..making.factory import ToolFactory
from ..sandbox.sandbox import Sandbox
from ..schemas.spec import ToolSpec, ToolState
from ..search.model import MODEL_HELP, commands_model
from ..text.hidden import replace_hidden
from ..text.terminal import harmless, print_header
from ..tools.registry import ToolRegistry

_WELL, _TOOL_FAILED, _USAGE = 0, 1, 2
Command = Callable[[ToolFactory, argparse.Namespace], object]


def add_tools(tools: argparse.ArgumentParser, policy: argparse.ArgumentParser) -> None:
    """Add the commands about tools; `policy` has the options that say what their cells may do."""
    policy.add_argument(
        "--registry", metavar="FILE",
        help="where made tools are kept; `create` and `import` make a missing file",
    )  # fmt: skip
    commands = tools.add_subparsers(required=True, metavar="WHAT")

    def add(name: str, summary: str, command: Command, *, of_one: bool = True) -> Any:
        parser = commands.add_parser(name, help=summary, parents=[policy])
        parser.set_defaults(carry_out=command)
        if of_one:
            parser.add_argument("name", metavar="NAME", help="of a tool; name@2 is a version")
        return parser

    every = add("list", "the tools that there are", _list, of_one=False)
    every.add_argument("--retired", action="store_true", help="those that are retired too")
    every.add_argument("--json", action="store_true", help="one JSON array on stdout")
    search = add("search", "find tools by what they are for", _search, of_one=False)
    search.add_argument("query", metavar="QUERY", help="some words, or a name")
    search.add_argument("--limit", type=int, default=5, metavar="N", help="at most so many")
    search.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    search.add_argument("--json", action="store_true", help="one JSON object on stdout")
    show = add("show", "all that is known of a tool", _show)
    show.add_argument("--source", action="store_true", help="its source alone")
    _add_create(add("create", "make a tool of source code", _create, of_one=False))
    for name, summary, command in (
        ("call", "call a tool and print its result as JSON", _call),
        ("test", "call a tool without counting; without INPUT run its own tests", _test),
    ):
        calls = add(name, summary, command)
        calls.add_argument("input", nargs="?", metavar="INPUT", help="a JSON object; - reads it")
    explains = add(
        "explain", "say what the policy's rules make of a call, without calling", _explain
    )
    explains.add_argument("input", nargs="?", metavar="INPUT", help="a JSON object; - reads it")
    add("remove", "forget a tool and its versions", _remove)
    add("trust", "say that a tool can be relied on", _trust)
    add("retire", "take a tool back", _retire)
    exports = add("export", "write a tool as files", _export)
    exports.add_argument("directory", metavar="DIR", help="a folder of its name is made there")
    imports = add("import", "make a tool of exported files", _import, of_one=False)
    imports.add_argument("folder", metavar="FOLDER")
    imports.add_argument("--grant", action="store_true", help="let it do what it asks for")
    imports.add_argument("--similar", action="store_true", help="although another does the same")


def _add_create(create: argparse.ArgumentParser) -> None:
    create.add_argument("file", metavar="FILE", help="its source; - for standard input")
    create.add_argument("--name", metavar="N", help="that of the file unless told")
    create.add_argument("--description", metavar="D", default="", help="else that in the source")
    create.add_argument("--schema", metavar="FILE", help="JSON Schema of its arguments")
    create.add_argument("--test", dest="tests", action="append", default=[], metavar="FILE",
                        help="source that asserts; may be repeated")  # fmt: skip
    create.add_argument("--read", action="append", default=[], metavar="GLOB",
                        help="host files that it may read; may be repeated")  # fmt: skip
    create.add_argument("--write", action="append", default=[], metavar="GLOB",
                        help="host files that it may write; may be repeated")  # fmt: skip
    create.add_argument("--calls", action="append", default=[], metavar="NAME",
                        help="a tool that it may call; may be repeated")  # fmt: skip
    create.add_argument("--risky", action="store_true", help="every call has to be approved")
    create.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="of a call, seconds"
    )
    create.add_argument("--similar", action="store_true", help="although another does the same")


def carry_out(options: argparse.Namespace, policy: Policy) -> int:
    """Run one command; return its exit status."""
    options.rules = policy.tools
    ceiling = Sandbox(policy=policy, pool=0, audit=False) if options.policy else None
    try:
        with (
            _registry(options) as registry,
            ToolFactory(
                ceiling,
                registry,
                pool=0,
                optional_layers=policy.optional_layers,
                model=commands_model(getattr(options, "model", None)),
            ) as factory,
        ):
            options.carry_out(factory, options)
            return _WELL
    except ToolError as error:
        print(f"cellwright: {harmless(str(error))}", file=sys.stderr)
        return _TOOL_FAILED if isinstance(error, ToolFailed | ToolResultInvalid) else _USAGE
    finally:
        if ceiling:
            ceiling.close()


def _registry(options: argparse.Namespace) -> ToolRegistry:
    """Open the registry; only a command that adds a tool makes a file that `--registry` names."""
    if options.registry is None:
        return ToolRegistry(_usual_place())
    return ToolRegistry(options.registry, must_exist=options.carry_out not in (_create, _import))


def _usual_place() -> str:
    """Return where tools of this user are kept (XDG Base Directory Specification)."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    try:
        (base / "cellwright").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        hint = "name a file with --registry"
        raise PolicyError(f"cannot make {base}/cellwright: {error.strerror}", hint) from None
    return str(base / "cellwright" / "tools.db")


def _list(factory: ToolFactory, options: argparse.Namespace) -> None:
    specs = factory.registry.list_tools(retired=options.retired)
    if options.json:
        _print_json([_summary(factory, spec) for spec in specs])
        return
    print_header(f"{'NAME':24} {'STATE':8} DESCRIPTION")
    for spec in specs:
        first = spec.description.partition("\n")[0]
        print(f"{spec.reference:24} {spec.state.value:8} {harmless(first)}")


def _search(factory: ToolFactory, options: argparse.Namespace) -> None:
    found = factory.search(options.query, options.limit)
    if options.json:
        _print_json(found)
        return
    print_header(f"{'NAME':24} DESCRIPTION")
    for each in found["tools"]:
        print(f"{each['name']:24} {harmless(each['description'])}")
    if hint := found.get("hint"):
        print(f"cellwright: {harmless(hint)}", file=sys.stderr)


def _summary(factory: ToolFactory, spec: ToolSpec) -> dict[str, Any]:
    usage = factory.registry.usage(spec.name)
    return {
        "name": spec.name, "version": spec.version, "state": spec.state.value,
        "description": spec.description, "uses": usage.uses, "failures": usage.failures,
    }  # fmt: skip


def _show(factory: ToolFactory, options: argparse.Namespace) -> None:
    spec = factory.get_tool(options.name)
    if options.source:
        print(harmless(spec.source_code))
        return
    usage = factory.registry.usage(options.name)._asdict()
    _print_json(msgspec.to_builtins(spec) | {"usage": usage}, indent=2)


def _create(factory: ToolFactory, options: argparse.Namespace) -> None:
    if options.file == "-" and not options.name:
        raise PolicyError("--name: standard input has none")
    granted = PermissionSet()
    for level, globs in (
        (PermissionLevel.READ, options.read),
        (PermissionLevel.WRITE, options.write),
    ):
        if globs:
            granted.add(FilePermission(level=level, allowed_paths=globs))
    spec = factory.create_tool(
        options.name or Path(options.file).stem, options.description, _read(options.file),
        _json(_read(options.schema)) if options.schema else None, granted,
        [_read(file) for file in options.tests], options.timeout, calls=options.calls,
        risky=options.risky, allow_similar=options.similar,
    )  # fmt: skip
    _tell(spec)


def _call(factory: ToolFactory, options: argparse.Namespace) -> None:
    _print_json(factory.call(options.name, _input(options)))


def _test(factory: ToolFactory, options: argparse.Namespace) -> None:
    if options.input is not None:
        _print_json(factory.test_tool(options.name, _input(options)))
        return
    print(f"{factory.run_tests(options.name)} tests passed")


def _explain(factory: ToolFactory, options: argparse.Namespace) -> None:
    spec = factory.get_tool(options.name)
    for line in factory.broker.explain(spec.name, _input(options), options.rules):
        print(harmless(line))


def _remove(factory: ToolFactory, options: argparse.Namespace) -> None:
    factory.registry.remove(options.name)


def _trust(factory: ToolFactory, options: argparse.Namespace) -> None:
    _tell(factory.registry.set_state(options.name, ToolState.TRUSTED))


def _retire(factory: ToolFactory, options: argparse.Namespace) -> None:
    _tell(factory.registry.set_state(options.name, ToolState.RETIRED))


def _export(factory: ToolFactory, options: argparse.Namespace) -> None:
    print(factory.export_tool(options.name, options.directory))


def _import(factory: ToolFactory, options: argparse.Namespace) -> None:
    _tell(factory.import_tool(options.folder, grant=options.grant, allow_similar=options.similar))


def _tell(spec: ToolSpec) -> None:
    print(f"{spec.reference} {spec.state.value}")


def _input(options: argparse.Namespace) -> dict[str, Any]:
    text = sys.stdin.read() if options.input == "-" else options.input or "{}"
    found = _json(text)
    if not isinstance(found, dict):
        raise PolicyError("INPUT: must be a JSON object")
    return found


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise PolicyError(f"not JSON: {error}") from None


def _read(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"cannot read {path}: {error}") from None


def _print_json(value: Any, indent: int = 0) -> None:
    encoded = msgspec.json.encode(value)
    text = msgspec.json.format(encoded, indent=indent).decode() if indent else encoded.decode()
    print(replace_hidden(text, lambda character: json.dumps(character)[1:-1]))
