"""`build_image`: makes an image as a Dockerfile says.

Each RUN has a cell of the image so far, with the policy's network rules, and its changes become a
layer; COPY and ADD write their layer here.  Other instructions change the configuration only.  A step
is taken from the cache if its key is known: the layers so far, the instruction with its variables
replaced, and of RUN all that its command sees, of COPY the digest of the sources.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from ....policies.errors import PolicyError
from ....policies.policy import Policy, check_policy
from ....policies.profiles.loading import load_policy
from ..images.image import StoredImage
from ..images.image_names import normalised
from ..images.image_store import ImageStore
from ..projects.project_policy import rule_of
from .build_cells import opened_cells
from .build_context import BuildContext, dockerfile_of, read_small
from .build_stages import BuildStages, BuildTools
from .dockerfile import parse
from .dockerfile_words import LineError

_POLICY = Path(__file__).with_name("build.toml")
_PORTS = (80, 443)  # default of --allow HOST: package managers use both


def build_image(
    context: str | os.PathLike[str], *, dockerfile: str | os.PathLike[str] | None = None,
    name: str = "", target: str = "", args: Mapping[str, str] = {},
    policy: str | os.PathLike[str] | Policy | None = None, allow: Sequence[str] = (),
    store: ImageStore | None = None, use_cache: bool = True,
    on_progress: Callable[[str], object] | None = None,
) -> StoredImage:  # fmt: skip
    """Build the image of a Dockerfile and return it.

    `dockerfile`: default `Dockerfile` in the directory `context`.  `name`: names the image.  `target`:
    the stage to build, by name or number, default the last.  `args`: values for ARG.  `policy`: of
    the cells of RUN, a profile, a file or a Policy; default one with room for compilers and without
    network.  `allow`: further hosts that RUN may reach, HOST[:PORT][@NETWORK], by default at the ports
    80 and 443.  `on_progress`: called with each line for people.

    Raises PolicyError, which begins with the file and the line, for an invalid instruction and for what
    is not supported; BuildFailed for a RUN that fails; LaunchError.
    """
    if name:
        normalised(name)
    images = store or ImageStore()
    where = dockerfile_of(os.fspath(context), dockerfile)
    with contextlib.ExitStack() as stack:
        try:
            text = read_small(where)
        except FileNotFoundError:
            raise PolicyError(f"{where}: No such file or directory") from None
        opened = BuildContext(os.fspath(context), where)
        stack.callback(opened.close)
        cells = stack.enter_context(opened_cells(build_policy(policy, allow), images))
        tools = BuildTools(
            images, opened, cells, stack, where=os.path.basename(where), use_cache=use_cache,
            say=on_progress or (lambda _: None),
        )  # fmt: skip
        stages: BuildStages | None = None
        try:
            stages = BuildStages(parse(text), args, tools)
            return stages.build(target, name)
        except LineError as error:
            raise PolicyError(f"{tools.where}:{error.number}: {error.what}", error.hint) from None
        except (ValueError, OSError) as error:  # also PolicyError
            place = f"{tools.where}:{stages.line}" if stages else tools.where
            what, hint = (
                (error.what, error.hint) if isinstance(error, PolicyError) else (str(error), "")
            )
            raise PolicyError(f"{place}: {what}", hint) from error


def build_policy(
    given: str | os.PathLike[str] | Policy | None, allow: Sequence[str] = ()
) -> Policy:
    """Return the policy of a build; raises PolicyError."""
    if isinstance(given, Policy):
        policy = given
    else:
        policy = load_policy(os.fspath(given) if given else str(_POLICY))
    rules = [rule_of(each) for each in allow]
    rules = [each if each.ports else replace(each, ports=_PORTS) for each in rules]
    network = replace(policy.network, allow=(*policy.network.allow, *rules))
    return check_policy(replace(policy, network=network))
