"""`cellwright bench`: the benchmarks, under the policy that the options name."""

import argparse

from ....benchmarks.commands import BENCHMARKS, add_bench, bench
from ..options import add_policy, policy_of

BENCHMARK_NAMES = (*BENCHMARKS, "all")


def add(parser: argparse.ArgumentParser) -> None:
    add_policy(parser)
    add_bench(parser)


def run(options: argparse.Namespace) -> int:
    return bench(options, policy_of(options))
