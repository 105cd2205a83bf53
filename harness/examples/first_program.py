"""A first program: run code in a cell, read its value, and see refused attempts."""

from cellwright import Sandbox


def main() -> None:
    with Sandbox() as sandbox:
        result = sandbox.execute("print('hello')\nsum(numbers)", inputs={"numbers": [1, 2, 3]})
        print(result.status.name, result.stdout.strip(), result.value)

        result = sandbox.execute("open('/etc/shadow').read()")
        print(result.status.name, result.error)
        for seen in result.violations:  # told by the kernel, not by the program
            print("refused:", seen.syscall, *seen.arguments, seen.rule)


if __name__ == "__main__":
    main()
