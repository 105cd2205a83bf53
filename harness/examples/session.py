"""A session: calls that build on each other, in one cell; a failure leaves the state as it was."""

from cellwright import Sandbox


def main() -> None:
    with Sandbox() as sandbox, sandbox.session() as session:
        session.execute("import statistics\nrows = [3, 1, 2]")
        print(session.execute("statistics.median(rows)").value)
        print(session.execute("rows[7]").error)
        print(session.execute("rows.append(9)\nsorted(rows)").value)


if __name__ == "__main__":
    main()
