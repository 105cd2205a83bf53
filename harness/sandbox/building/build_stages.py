"""`BuildStages`: the stages of one build, each made once, when another or the caller needs it."""

import contextlib
import hashlib
import os
import posixpath
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from ....policies.errors import BuildFailed, PolicyError
from ..images.image import MOST_LAYERS, ImageConfig, StoredImage
from ..images.image_names import normalised
from ..images.image_sources import machine_here
from ..images.image_store import ImageStore
from .build_cells import BuildCells, BuildCommand
from .build_config import (
    command_of,
    configured,
    directory_of,
    environment_of,
)
from .build_context import BuildContext
from .copies import Copies, CopyStep
from .dockerfile import BuildStage, Dockerfile, Instruction
from .dockerfile_lines import heredoc_marks
from .dockerfile_words import LineError, expand

_RULES = 1  # a part of each key: raise it when a step would make other files than before
_FREE_ARGUMENTS = ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
_SHOWN = 200  # characters of an instruction
_OUTPUT_LINES = 30


class BuildTools:
    """The store, the context, the cells and the cache that all stages of one build share."""

    def __init__(
        self, store: ImageStore, context: BuildContext, cells: BuildCells,
        held: contextlib.ExitStack, *, where: str, use_cache: bool, say: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.store, self.context, self.cells, self.where = store, context, cells, where
        self.say = say
        self._use_cache, self._held = use_cache, held
        self._known: set[str] = set()
        epoch = os.environ.get("SOURCE_DATE_EPOCH", "")
        self.latest = int(epoch) if epoch.isdigit() else None

    def hold(self, image: StoredImage) -> StoredImage:
        """Keep an image from being removed until the build ends."""
        if image.digest not in self._known:
            self._held.enter_context(self.store.hold(image))
            self._known.add(image.digest)
        return image

    def cached(self, key: str) -> StoredImage | None:
        """Return the image that a step with this key has made, if it is there."""
        if not self._use_cache:
            return None
        with contextlib.suppress(FileNotFoundError, PolicyError):
            return self.hold(self.store.find((self.store.builds / key).read_text()))
        return None

    def remember(self, key: str, image: StoredImage) -> StoredImage:
        place = self.store.builds / key
        new = place.with_name(f"{key}.{os.urandom(8).hex()}")
        new.write_text(self.hold(image).digest)
        new.replace(place)
        return image


class StageState(NamedTuple):
    """A stage so far: its layers, without any None; its configuration; the ARG in scope."""

    image: StoredImage | None
    config: ImageConfig
    arguments: dict[str, str]
    created: str = ""
    has_command: bool = False  # a CMD of its own

    @property
    def variables(self) -> dict[str, str]:
        """The variables of RUN, which are also replaced in other instructions."""
        return {**self.arguments, **environment_of(self.config)}


class BuildStages:
    """Builds stages of a Dockerfile; `line` is that of the instruction that runs."""

    def __init__(self, file: Dockerfile, args: Mapping[str, str], tools: BuildTools) -> None:
        self._file, self._given, self._tools = file, dict(args), tools
        self._made: dict[int, StageState] = {}
        self._copies = Copies(tools.context, tools.cells, tools.store, tools.latest)
        self._used_arguments: set[str] = set()
        self._step = 0
        self.line = 0
        machine = machine_here()
        self._platform = f"linux/{machine}"
        self._automatic = {
            f"{each}{part}": value
            for each in ("TARGET", "BUILD")
            for part, value in (
                ("PLATFORM", self._platform), ("OS", "linux"), ("ARCH", machine), ("VARIANT", ""),
            )
        }  # fmt: skip
        self._global = self._global_arguments()

    def build(self, target: str, name: str) -> StoredImage:
        """Build a stage, "" for the last one, and return its image."""
        last = self._numbered(target) if target else len(self._file.stages) - 1
        state = self._stage(last)
        if state.image is None:
            raise ValueError("the stage has no files: nothing was copied into it")
        for unused in sorted(set(self._given) - self._used_arguments):
            if unused.lower() not in _FREE_ARGUMENTS:
                self._tools.say(f"no ARG takes the value of {unused}")
        created = state.created
        if (latest := self._tools.latest) is not None:
            created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(latest))
        return self._tools.store.describe(state.image, state.config, name, created)

    def _numbered(self, target: str) -> int:
        for number, stage in enumerate(self._file.stages):
            if target.lower() == stage.name or target == str(number):
                return number
        names = ", ".join(filter(None, (each.name for each in self._file.stages))) or "none"
        raise LineError(1, f"target: no stage {target[:80]!a}", f"named stages: {names}")

    def _global_arguments(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for each in self._file.arguments:
            self.line = each.line
            known = {**self._automatic, **found}
            found |= self._declared(each, known, {})
        return found

    def _declared(
        self, given: Instruction, known: Mapping[str, str], default: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the values that an ARG gives; `default`: those of names without one."""
        found = {}
        for word in given.words:
            name, equals, value = word.partition("=")
            name = self._expand(name, known)
            self._used_arguments.add(name)
            if name in self._given:
                found[name] = self._given[name]
            elif equals:
                found[name] = self._expand(value, known)
            elif name in default:
                found[name] = default[name]
        return found

    def _expand(self, text: str, variables: Mapping[str, str]) -> str:
        return expand(text, variables, self._file.escape)

    def _stage(self, number: int) -> StageState:
        if number not in self._made:
            stage = self._file.stages[number]
            state = self._base(stage, number)
            count = len(stage.instructions)
            for at, each in enumerate(stage.instructions, 1):
                state = self._stepped(state, each, f"[{stage.name or number} {at}/{count}]", number)
            self._made[number] = state
        return self._made[number]

    def _base(self, stage: BuildStage, number: int) -> StageState:
        self.line = stage.line
        known = {**self._automatic, **self._global}
        platform = self._expand(stage.platform, known)
        if platform not in ("", self._platform):
            raise ValueError(
                f"FROM: --platform must be {self._platform}, that of this machine, got {platform!a}"
            )
        base = self._expand(stage.base, known)
        free = {name: self._given[name] for name in self._given if name.lower() in _FREE_ARGUMENTS}
        above = [each.name for each in self._file.stages[:number]]
        if base.lower() in above:
            made = self._stage(above.index(base.lower()))
            self.line = stage.line
            return made._replace(has_command=False)
        if base == "scratch":
            return StageState(None, ImageConfig(), free)
        image = self._found(base)
        return StageState(image, image.config, free, image.created)

    def _found(self, reference: str) -> StoredImage:
        """Return an image of the store by its name or digest; a Dockerfile imports no path."""
        if not reference.removeprefix("sha256:").isalnum():
            normalised(reference)
        return self._tools.hold(self._tools.store.find(reference))

    def _stepped(self, state: StageState, given: Instruction, mark: str, number: int) -> StageState:
        self.line = given.line
        shown = " ".join(str(given).split())
        self._tools.say(f"{mark} {shown[:_SHOWN]}{'...' if len(shown) > _SHOWN else ''}")
        if given.keyword == "ARG":
            told = self._declared(given, state.variables, {**self._automatic, **self._global})
            return state._replace(arguments={**state.arguments, **told})
        if given.keyword not in ("RUN", "COPY", "ADD", "WORKDIR"):
            return self._configured(state, given)
        if state.image and len(state.image.layers) >= MOST_LAYERS:
            raise ValueError(f"more than {MOST_LAYERS} layers; join instructions of RUN by &&")
        key, make = self._step_of(state, given, number)
        began = time.monotonic()
        digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()
        image = self._tools.cached(digest)
        if image:
            self._tools.say(f"{mark} cached")
        else:
            image = self._tools.remember(digest, make())
            self._tools.say(f"{mark} done in {time.monotonic() - began:.1f} s")
        self.line = given.line
        if given.keyword == "WORKDIR":
            place = directory_of(state.config, self._expand(given.words[0], state.variables))
            state = state._replace(config=msgspec.structs.replace(state.config, working_dir=place))
        return state._replace(image=image)

    def _configured(self, state: StageState, given: Instruction) -> StageState:
        config = configured(state.config, given, lambda text: self._expand(text, state.variables))
        if given.keyword == "ENTRYPOINT" and not state.has_command:
            # a CMD of the base belongs to its ENTRYPOINT
            config = msgspec.structs.replace(config, cmd=())
        return state._replace(
            config=config, has_command=state.has_command or given.keyword == "CMD"
        )

    def _step_of(
        self, state: StageState, given: Instruction, number: int
    ) -> tuple[object, Callable[[], StoredImage]]:
        """Return the key of a step that makes a layer, and the function that makes it."""
        layers = [posixpath.basename(posixpath.dirname(each)) for each in _layers(state.image)]
        key = [_RULES, self._tools.store.ids.name, layers, given.keyword]
        if given.keyword == "RUN":
            command = self._command(state, given)
            policy = msgspec.structs.replace(self._tools.cells.policy, name="")
            return [*key, command, policy], lambda: self._run(state, given, command)
        if given.keyword == "WORKDIR":
            place = directory_of(state.config, self._expand(given.words[0], state.variables))
            step = CopyStep((), f"{place}/", state.config.user)
        else:
            step = self._copy_step(state, given, number)
        return [*key, *self._copies.key(step)], lambda: self._copies.make(state.image, step)

    def _command(self, state: StageState, given: Instruction) -> BuildCommand:
        config, script = state.config, ""
        argv = command_of(config, given)
        if given.heredocs and not given.is_exec:
            first = given.heredocs[0]
            if [given.words[0]] == heredoc_marks(given.words):  # the whole line is <<NAME
                script = first.content if first.content.startswith("#!") else ""
                text = first.content
            else:
                text = f"{given.words[0]}\n" + "".join(each.in_full for each in given.heredocs)
            argv = (*argv[:-1], text)
        return BuildCommand(argv, config.user, config.working_dir, state.variables, script)

    def _run(self, state: StageState, given: Instruction, command: BuildCommand) -> StoredImage:
        if state.image is None:
            raise ValueError("RUN: the stage has no files, so no shell")
        done, image = self._tools.cells.run(state.image, command)
        output = (done.stdout + done.stderr).strip()
        for each in output.splitlines():
            self._tools.say(f"  | {each}")
        if image is None:
            last = "\n".join(output.splitlines()[-_OUTPUT_LINES:])
            status = done.error or f"exit status {done.exit_code}"
            raise BuildFailed(
                f"{self._tools.where}:{given.line}: RUN failed with {status}\n{last}",
                line=given.line, exited=done.exit_code, output=output,
            )  # fmt: skip
        return image

    def _copy_step(self, state: StageState, given: Instruction, number: int) -> CopyStep:
        def expanded(text: str) -> str:
            return self._expand(text, state.variables)

        flags = {name: expanded(value) for name, value in given.flags.items()}
        marks = heredoc_marks(given.words)
        texts = {
            each.name: expand(each.content, state.variables, "\\", keeps_quotes=True)
            if each.expands else each.content
            for each in given.heredocs
        }  # fmt: skip
        words = [expanded(each) for each in given.words if each not in marks]
        destination = directory_of(state.config, words[-1])
        if words[-1].endswith(("/", "/.")) or words[-1] == ".":
            destination = f"{destination.rstrip('/')}/"
        source = None
        if "from" in flags:
            source = self._source(flags["from"], number)
            self.line = given.line
        return CopyStep(
            tuple(words[:-1]), destination, flags.get("chown", ""), mode=flags.get("chmod", ""),
            texts=texts, image=source, unpacks=given.keyword == "ADD",
        )  # fmt: skip

    def _source(self, reference: str, number: int) -> StoredImage:
        names = [each.name for each in self._file.stages[:number]]
        if reference.isdigit() and int(reference) < number:
            image = self._stage(int(reference)).image
        elif reference.lower() in names:
            image = self._stage(names.index(reference.lower())).image
        else:
            return self._found(reference)
        if image is None:
            raise ValueError(f"COPY: the stage {reference!a} has no files")
        return image


def _layers(image: StoredImage | None) -> tuple[str, ...]:
    return image.layers if image else ()
