"""The messages between the two processes of the ladder: one measures, the other forks."""

import msgspec

FORK = "bare fork"
AHEAD = "the four made ahead"


class Order(msgspec.Struct, frozen=True):
    """How often to measure each stage; comes with what the cgroups of a cell are joined through."""

    rounds: int
    into_cgroup: bool


class StageTimes(msgspec.Struct, frozen=True):
    """Seconds until all layers of a stage are on, and until nothing of its process is left; seconds of
    one system call behind them; or what the kernel refused."""

    ready: list[float] = []
    gone: list[float] = []
    call: list[float] = []
    refused: str = ""


TimesByStage = dict[str, StageTimes]  # by the name of the stage
