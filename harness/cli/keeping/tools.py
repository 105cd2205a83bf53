"""`cellwright tools`: creates, calls, lists and changes the tools of a registry."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ....policies.argument_checks import did_you_mean
from ....policies.errors import PolicyError, ToolError, ToolFailed, ToolNotFound, ToolResultInvalid
from ....policies.permission_sets import FilePermission, PermissionLevel, PermissionSet
from ...making.factory import ToolFactory
from ...sandbox.sandbox import Sandbox
from ...sandbox.sandbox_arguments import HostSettings
from ...schemas.spec import ToolSpec, ToolState
from ...search.search import MODEL_HELP, commands_model
from ...text.terminal_text import ProgressLine, harmless, print_header
from ...tools.registry import ToolRegistry
from ..options import (
    FAILED,
    SUCCEEDED,
    USAGE_ERROR,
    add_json,
    add_policy,
    add_subcommands,
    policy_of,
    print_json,
)
from ..package_options import add_sources, store_of

_SIMILAR = "allow it even if an existing tool does the same"
Action = Callable[[ToolFactory, argparse.Namespace], object]


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)

    def add_one(name: str, summary: str, action: Action) -> argparse.ArgumentParser:
        """Add a command that takes the name of a tool."""
        command = add_command(name, summary, action)
        command.add_argument("name", metavar="NAME", help="the tool; name@2 is its version 2")
        return command

    listed = add_command("list", "list the tools", _list)
    listed.add_argument("--retired", action="store_true", help="list retired tools, too")
    add_json(listed)
    search = add_command("search", "find tools by words or a name", _search)
    search.add_argument("query", metavar="QUERY", help="words, or a name")
    search.add_argument(
        "--limit", type=int, default=5, metavar="N", help="number of results at most; default 5"
    )
    search.add_argument("--model", metavar="DIR", help=MODEL_HELP)
    add_json(search, "object")
    show = add_one("show", "print everything about a tool as JSON", _show)
    show.add_argument("--source", action="store_true", help="print only its source")
    _add_create(add_command("create", "create a tool from source", _create))
    for name, summary, action in (
        ("call", "call a tool and print its result as JSON", _call),
        ("test", "call a tool without counting the use; without INPUT run its tests", _test),
        ("explain", "show how the rules of the policy decide on a call, without calling", _explain),
    ):
        add_one(name, summary, action).add_argument(
            "input",
            nargs="?",
            metavar="INPUT",
            help="a JSON object; - reads standard input; default {}, for test the tool's own tests",
        )
    add_one("remove", "delete a tool and all its versions", _remove)
    add_one("trust", "set the state of a tool to trusted", _trust)
    add_one("retire", "set the state of a tool to retired: it is offered no more", _retire)
    exports = add_one("export", "write a tool to files", _export)
    exports.add_argument("directory", metavar="DIR", help="the parent of the new folder")
    exports.add_argument(
        "--as-skill", action="store_true",
        help="write a skill that holds the tool and its tests, for `cellwright skills import`",
    )  # fmt: skip
    imports = add_command("import", "create a tool from exported files", _import)
    imports.add_argument("folder", metavar="FOLDER", help="the folder that export made")
    imports.add_argument(
        "--grant", action="store_true", help="grant the permissions that the files ask for"
    )
    imports.add_argument("--similar", action="store_true", help=_SIMILAR)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    parser.add_argument(
        "--registry", metavar="FILE",
        help="the file of the tools, which create and import make if it is missing; default in the "
        "user's data",
    )  # fmt: skip


def _add_create(create: argparse.ArgumentParser) -> None:
    create.add_argument("file", metavar="FILE", help="the source; - reads standard input")
    create.add_argument("--name", metavar="N", help="the name; default that of the file")
    create.add_argument(
        "--description", metavar="D", default="", help="the description; default its docstring"
    )
    create.add_argument(
        "--schema",
        metavar="FILE",
        help="the JSON Schema of its arguments; default that of its signature",
    )
    create.add_argument("--test", dest="tests", action="append", default=[], metavar="FILE",
                        help="a test, source with assertions; may be repeated")  # fmt: skip
    create.add_argument("--no-tests", action="store_true",
                        help="do not copy the tests of the previous version; default is to copy them "
                        "if no --test is given")  # fmt: skip
    create.add_argument("--read", action="append", default=[], metavar="GLOB",
                        help="files of the host that it may read; may be repeated")  # fmt: skip
    create.add_argument("--write", action="append", default=[], metavar="GLOB",
                        help="files of the host that it may write; may be repeated")  # fmt: skip
    create.add_argument("--calls", action="append", default=[], metavar="NAME",
                        help="a tool that it may call; may be repeated")  # fmt: skip
    create.add_argument("--requires", action="append", default=[], metavar="P",
                        help="a package that it imports, as 'idna==3.*'; may be repeated")  # fmt: skip
    add_sources(create)
    create.add_argument("--risky", action="store_true", help="every call needs approval")
    create.add_argument(
        "--timeout", type=float, default=30.0, metavar="S",
        help="wall-clock limit of a call in seconds; default 30",
    )  # fmt: skip
    create.add_argument("--similar", action="store_true", help=_SIMILAR)


def run(options: argparse.Namespace) -> int:
    policy = policy_of(options)
    options.rules = policy.tools
    store = store_of(options) if getattr(options, "requires", ()) else None
    ceiling = None
    if options.policy:
        ceiling = Sandbox(
            policy=policy, pool=0, audit=False, host=HostSettings(package_store=store)
        )
    try:
        with (
            _registry(options) as registry,
            ToolFactory(
                ceiling,
                registry,
                pool=0,
                optional_layers=policy.optional_layers,
                model=commands_model(getattr(options, "model", None)),
                package_store=store,
            ) as factory,
        ):
            _act(factory, options)
            return SUCCEEDED
    except ToolError as error:
        print(f"cellwright: {harmless(error.what)}", file=sys.stderr)
        if error.hint:
            print(f"hint: {harmless(error.hint)}", file=sys.stderr)
        is_tool_at_fault = isinstance(error, ToolFailed | ToolResultInvalid)
        return FAILED if is_tool_at_fault else USAGE_ERROR
    finally:
        if ceiling:
            ceiling.close()


def _act(factory: ToolFactory, options: argparse.Namespace) -> None:
    """Execute the command; the error about an unknown tool has a hint."""
    try:
        options.action(factory, options)
    except ToolNotFound as error:
        known = [each.name for each in factory.registry.list_tools()]
        hint = did_you_mean(error.tool, known, "`cellwright tools list` lists the tools")
        raise ToolNotFound(error.what, error.hint or hint, tool=error.tool) from None


def _registry(options: argparse.Namespace) -> ToolRegistry:
    """Open the registry; only a command that adds a tool makes a file that `--registry` names."""
    if options.registry is None:
        return ToolRegistry(default_registry())
    return ToolRegistry(options.registry, must_exist=options.action not in (_create, _import))


def default_registry() -> str:
    """Return the file of this user's tools (XDG Base Directory Specification)."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    try:
        (base / "cellwright").mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        hint = "name a file with --registry"
        raise PolicyError(f"cannot create {base}/cellwright: {error.strerror}", hint) from None
    return str(base / "cellwright" / "tools.db")


def _list(factory: ToolFactory, options: argparse.Namespace) -> None:
    specs = factory.registry.list_tools(retired=options.retired)
    if options.json:
        print_json([_summary(factory, spec) for spec in specs])
        return
    print_header(f"{'NAME':24} {'STATE':8} DESCRIPTION")
    if not specs:
        print("cellwright: no tools", file=sys.stderr)
    for spec in specs:
        first = spec.description.partition("\n")[0]
        print(f"{spec.reference:24} {spec.state.value:8} {harmless(first)}")


def _search(factory: ToolFactory, options: argparse.Namespace) -> None:
    found = factory.search(options.query, options.limit)
    if options.json:
        print_json(found)
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
    print_json(msgspec.to_builtins(spec) | {"usage": usage}, indent=2)


def _create(factory: ToolFactory, options: argparse.Namespace) -> None:
    if options.file == "-" and not options.name:
        raise PolicyError("--name: required if the source is standard input")
    if options.tests and options.no_tests:
        raise PolicyError("--no-tests: cannot be combined with --test")
    tests = [_read(file) for file in options.tests] if options.tests or options.no_tests else None
    granted = PermissionSet()
    for level, globs in (
        (PermissionLevel.READ, options.read),
        (PermissionLevel.WRITE, options.write),
    ):
        if globs:
            granted.add(FilePermission(level=level, allowed_paths=globs))
    source = _read(options.file)
    schema = _json("--schema", _read(options.schema)) if options.schema else None
    with ProgressLine("making and testing the tool"):
        spec = factory.create_tool(
            options.name or Path(options.file).stem, options.description, source, schema, granted,
            tests, options.timeout, calls=options.calls, requirements=options.requires,
            risky=options.risky, allow_similar=options.similar,
        )  # fmt: skip
    _print_state(spec)


def _call(factory: ToolFactory, options: argparse.Namespace) -> None:
    given = _input(options)
    with ProgressLine("calling the tool"):
        result = factory.call(options.name, given)
    print_json(result)


def _test(factory: ToolFactory, options: argparse.Namespace) -> None:
    if options.input is not None:
        given = _input(options)
        with ProgressLine("calling the tool"):
            result = factory.test_tool(options.name, given)
        print_json(result)
        return
    with ProgressLine("running the tests of the tool"):
        count = factory.run_tests(options.name)
    print(f"{count} tests passed")


def _explain(factory: ToolFactory, options: argparse.Namespace) -> None:
    spec = factory.get_tool(options.name)
    for line in factory.broker.explain(spec.name, _input(options), options.rules):
        print(harmless(line))


def _remove(factory: ToolFactory, options: argparse.Namespace) -> None:
    factory.registry.remove(options.name)


def _trust(factory: ToolFactory, options: argparse.Namespace) -> None:
    _print_state(factory.registry.set_state(options.name, ToolState.TRUSTED))


def _retire(factory: ToolFactory, options: argparse.Namespace) -> None:
    _print_state(factory.registry.set_state(options.name, ToolState.RETIRED))


def _export(factory: ToolFactory, options: argparse.Namespace) -> None:
    print(factory.export_tool(options.name, options.directory, as_skill=options.as_skill))


def _import(factory: ToolFactory, options: argparse.Namespace) -> None:
    with ProgressLine("making and testing the tool"):
        spec = factory.import_tool(
            options.folder, grant=options.grant, allow_similar=options.similar
        )
    _print_state(spec)


def _print_state(spec: ToolSpec) -> None:
    print(f"{spec.reference} {spec.state.value}")


def _input(options: argparse.Namespace) -> dict[str, Any]:
    text = sys.stdin.read() if options.input == "-" else options.input or "{}"
    value = _json("INPUT", text)
    if not isinstance(value, dict):
        raise PolicyError(f"INPUT: must be a JSON object, got {text[:100]!r}")
    return value


def _json(where: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(f"{where}: not JSON: {error}") from None


def _read(path: str) -> str:
    if path == "-":
        return sys.stdin.read()
    try:
        return Path(path).read_text()
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PolicyError(f"cannot read {path}: not UTF-8: byte {error.start}") from None
