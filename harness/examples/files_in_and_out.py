"""Files: pass a table into a cell, and bring back the report that a program makes of it."""

from cellwright import Sandbox

SALES = "region,units\nnorth,120\nsouth,80\nnorth,150\n"
PROGRAM = """
import csv
from collections import Counter

units = Counter()
with open("sales.csv") as file:
    for row in csv.DictReader(file):
        units[row["region"]] += int(row["units"])
with open("report.txt", "w") as file:
    file.writelines(f"{region} {count}\\n" for region, count in units.most_common())
"""


def main() -> None:
    with Sandbox() as sandbox:
        result = sandbox.execute(PROGRAM, files={"sales.csv": SALES}, collect=["report.txt"])
        print("new files:", [file.path for file in result.files])
        for artifact in result.artifacts:
            print(artifact.data.decode(), end="")


if __name__ == "__main__":
    main()
