"""Evaluation: run a model's code for many tasks at once, each in a cell of its own."""

import asyncio

from cellwright import Sandbox, SandboxResult

TASKS = {  # in HumanEval's form: the completion of a model, and the tests of the task
    "add": ("def add(a, b):\n    return a + b\n", "assert add(2, 3) == 5"),
    "largest": ("def largest(xs):\n    return xs[0]\n", "assert largest([1, 7, 3]) == 7"),
    "endless": ("def endless():\n    while True: pass\n", "endless()"),
    "greedy": ("def greedy():\n    return bytearray(1 << 30)\n", "greedy()"),
    "curious": ("def curious():\n    return open('/etc/shadow').read()\n", "curious()"),
}


def verdict(result: SandboxResult) -> str:
    return "passed" if result.ok else f"{result.reason}: {result.error}".splitlines()[0]


async def main() -> None:
    limits = {
        "extends": "strict",
        "limits": {"cpu_seconds": 1},
    }  # the same for each task on a busy host too
    async with await Sandbox.create(policy=limits) as sandbox:
        results = await asyncio.gather(
            *(sandbox.aexecute(code + tests) for code, tests in TASKS.values())
        )
    for name, result in zip(TASKS, results, strict=True):
        print(f"{name:8} {verdict(result)}")
    print(f"{sum(result.ok for result in results)} of {len(results)} passed")


if __name__ == "__main__":
    asyncio.run(main())
