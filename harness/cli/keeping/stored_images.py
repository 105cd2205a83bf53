"""`cellwright image`: pulls, imports, builds, lists, shows and removes images, the roots of cells."""

import argparse
import os
import sys

from ....policies.errors import PolicyError
from ...sandbox.images.image import StoredImage
from ...sandbox.images.image_registry import PullSettings
from ...sandbox.images.image_store import ImageStore
from ...text.terminal_text import ProgressLine, harmless_line, print_header
from ..options import PROFILES, SUCCEEDED, add_json, add_subcommands, print_json

_MIB = 1024 * 1024
_REFERENCE = "the image: its name, its digest (or 12 digits of it), or a path"


def add(parser: argparse.ArgumentParser) -> None:
    add_command = add_subcommands(parser, _add_common)
    pull = add_command("pull", "get an image from a registry", _pull)
    imported = add_command(
        "import", "take an OCI layout, a tar or a directory as an image", _import
    )
    listed = add_command("list", "list the images, those with names first", _list)
    show = add_command("show", "show the configuration and the layers of an image", _show)
    remove = add_command("remove", "remove a name, and the image with its last one", _remove)
    prune = add_command("prune", "remove images without a name that no sandbox uses", _prune)
    pull.add_argument(
        "name", metavar="NAME", help="as in docker pull: debian:12, example.org/me/app"
    )
    pull.add_argument(
        "--platform", metavar="PLATFORM", help="such as linux/arm64; default that of this machine"
    )
    pull.add_argument(
        "--insecure", action="store_true", help="ask by plain HTTP; loopback needs no option for it"
    )
    pull.add_argument(
        "--credentials",
        metavar="FILE",
        help="a file like docker's config.json, with user and password; no default",
    )
    imported.add_argument(
        "path", metavar="PATH", help="a layout, a tar of `docker save`, a directory"
    )
    imported.add_argument("name", metavar="NAME", nargs="?", default="", help="a name for it")
    _add_build(add_command("build", "make an image as a Dockerfile says", _build))
    show.add_argument("reference", metavar="IMAGE", help=_REFERENCE)
    remove.add_argument("reference", metavar="IMAGE", nargs="+", help=_REFERENCE)
    add_json(listed)
    add_json(prune)
    for each in (pull, imported, show):
        add_json(each, "object")


def _add_build(build: argparse.ArgumentParser) -> None:
    build.add_argument("context", metavar="CONTEXT", help="the directory that COPY takes files of")
    build.add_argument(
        "-f", "--file", metavar="FILE", help="the Dockerfile; default Dockerfile in CONTEXT"
    )
    build.add_argument(
        "-t", "--tag", default="", metavar="NAME", help="a name for the image; no default"
    )
    build.add_argument(
        "--target", default="", metavar="STAGE", help="the stage to build; default the last"
    )
    build.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME[=VALUE]",
        help="a value for ARG, without =VALUE that of this environment; default in the Dockerfile; may "
        "be repeated",
    )  # fmt: skip
    build.add_argument(
        "--no-cache", action="store_true", help="repeat all steps, also those that are known"
    )
    build.add_argument(
        "--allow", action="append", default=[], metavar="HOST[:PORT][@NETWORK]",
        help="a host that RUN may reach, at port 80 and 443, or PORT, at public addresses and those of "
        "NETWORK; default none; may be repeated",
    )  # fmt: skip
    build.add_argument(
        "--policy", metavar="P",
        help=f"the policy of RUN: a TOML file, or a profile: {', '.join(PROFILES)}; default workshop, "
        "with room for compilers",
    )  # fmt: skip
    add_json(build, "object")


def run(options: argparse.Namespace) -> int:
    options.action(ImageStore(options.directory), options)
    return SUCCEEDED


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory", metavar="DIR", help="the directory of images; default in the user's state"
    )


def _pull(store: ImageStore, options: argparse.Namespace) -> None:
    settings = PullSettings(_machine(options.platform), options.insecure, options.credentials)
    with ProgressLine("asking the registry") as progress:
        image = store.pull(options.name, settings, progress.say)
    _print_made(image, options)


def _machine(platform: str | None) -> str:
    if platform is None:
        return ""
    system, _, machine = platform.partition("/")
    if system != "linux" or not machine:
        raise PolicyError(
            f"--platform: must be linux/MACHINE, such as linux/arm64, got {platform!a}"
        )
    return machine


def _import(store: ImageStore, options: argparse.Namespace) -> None:
    with ProgressLine("unpacking"):
        image = store.import_(options.path, options.name)
    _print_made(image, options)


def _build(store: ImageStore, options: argparse.Namespace) -> None:
    from ...sandbox.building.image_build import build_image  # needs sandboxes

    args = {}
    for each in options.build_arg:
        name, equals, value = each.partition("=")
        if equals or name in os.environ:
            args[name] = value if equals else os.environ[name]
    image = build_image(
        options.context, dockerfile=options.file, name=options.tag, target=options.target,
        args=args, policy=options.policy, allow=options.allow, store=store,
        use_cache=not options.no_cache,
        on_progress=lambda line: print(harmless_line(line), file=sys.stderr, flush=True),
    )  # fmt: skip
    _print_made(image, options)


def _print_made(image: StoredImage, options: argparse.Namespace) -> None:
    if options.json:
        print_json(image)
    else:
        print(image.digest)


def _list(store: ImageStore, options: argparse.Namespace) -> None:
    found = store.list()
    if options.json:
        print_json(found)
        return
    print_header(f"{'DIGEST':<12}  {'MIB':>8}  {'LAYERS':>6}  NAMES")
    for each in found:
        names = harmless_line(", ".join(each.names)) or "-"
        print(f"{_short(each)}  {each.size_bytes / _MIB:>8.1f}  {len(each.layers):>6}  {names}")


def _short(image: StoredImage) -> str:
    return image.digest.removeprefix("sha256:")[:12]


def _show(store: ImageStore, options: argparse.Namespace) -> None:
    image = store.find(options.reference)
    if options.json:
        print_json(image)
        return
    config = image.config
    rows = [
        ("digest", (image.digest,)), ("name", image.names), ("created", (image.created,)),
        ("bytes", (f"{image.size_bytes:,}",)), ("user", (config.user,)),
        ("directory", (config.working_dir,)), ("entrypoint", (" ".join(config.entrypoint),)),
        ("command", (" ".join(config.cmd),)), ("variable", config.env), ("volume", config.volumes),
        ("port", config.exposed_ports),
        ("label", tuple(f"{name}={value}" for name, value in config.labels.items())),
        ("layer", image.layers),
    ]  # fmt: skip
    for title, values in rows:
        for value in filter(None, values):
            print(f"{title:<10} {harmless_line(value)}")


def _remove(store: ImageStore, options: argparse.Namespace) -> None:
    for each in options.reference:
        store.remove(each)


def _prune(store: ImageStore, options: argparse.Namespace) -> None:
    removed = store.prune()
    if options.json:
        print_json(removed)
    else:
        print(*removed, sep="\n", end="\n" if removed else "")
