"""Pure expressions answered by Monty (extra `monty`), beside the same ones in cells."""

import time

import msgspec

from ..harness.sandbox.sandbox import Sandbox
from ..policies.policy import Evaluator, Policy

_EXPRESSION = "[price * 2 for price in prices if price > 3]"
_INPUTS = {"prices": list(range(20))}


def main(calls: int = 200) -> None:
    """Print the median and the 90th percentile of a call, in milliseconds, one after the other."""
    for monty in (False, True, False, True):
        policy = msgspec.structs.replace(Policy(name="strict"), evaluator=Evaluator(monty=monty))
        with Sandbox(policy=policy) as sandbox:
            sandbox.execute(_EXPRESSION, inputs=_INPUTS)
            taken = sorted(_seconds(sandbox) for _ in range(calls))
        what = "monty" if monty else "cell"
        print(
            f"{what:6} p50 {taken[calls // 2] * 1e3:.2f} ms, p90 {taken[calls * 9 // 10] * 1e3:.2f} ms"
        )


def _seconds(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    sandbox.execute(_EXPRESSION, inputs=_INPUTS)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
