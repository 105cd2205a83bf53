"""Chores of agents: the files before, the calls that a model makes without programs, and the program
that it writes instead."""

import ast
import json
import random
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_LOGS, _LINES = 12, 350
_COMMITS, _SHOWN = 60, 20
_ORDERS, _PEOPLE, _MEETINGS, _SUMS = 500, 250, 60, 50
_SERVICES = ("auth", "billing", "cart", "mail", "search")
_ZONES = ("America/New_York", "Asia/Kolkata", "Europe/Berlin", "Europe/London", "Australia/Sydney")
_CHANCE = 20260101
Call = Callable[..., str]  # calls a tool by its full name; returns the text that a model reads


class Chore(NamedTuple):
    name: str
    prepare: Callable[[Path], None]
    by_calls: Callable[[Path, Call], Any]
    queries: tuple[str, ...]  # by which a model finds `tools`
    tools: tuple[str, ...]
    program: str  # {folder} stands for where the data is


def _logs(folder: Path) -> None:
    chance = random.Random(_CHANCE)
    (folder / "logs").mkdir()
    for number in range(_LOGS):
        lines = [
            f"2026-03-{number + 1:02} {chance.randrange(24):02}:{chance.randrange(60):02} "
            f"{chance.choice(('INFO', 'INFO', 'INFO', 'WARN', 'ERROR'))} "
            f"{chance.choice(_SERVICES)}: request {chance.randrange(1 << 32):08x} took "
            f"{chance.randrange(2000)} ms"
            for _ in range(_LINES)
        ]
        (folder / "logs" / f"day-{number:02}.log").write_text("\n".join(lines))


def _errors(folder: Path, call: Call) -> Any:
    seen: Counter[str] = Counter()
    listed = call("files.list_directory", path=f"{folder}/logs")
    for name in re.findall(r"day-\d+\.log", listed):
        text = call("files.read_text_file", path=f"{folder}/logs/{name}")
        seen.update(re.findall(r"ERROR (\w+):", text))
    return sorted(seen.items(), key=lambda each: -each[1])[0][0]


def _repository(folder: Path) -> None:
    place = folder / "repository"
    stream = ["reset refs/heads/main\n"]
    for number in range(_COMMITS):
        text = "\n".join(f"line {line} of {number}" for line in range(number % 7 * 12 + 20))
        name = _SERVICES[number % 5]
        said = f"Change {name} for the {number}th time"
        stream.append(
            f"commit refs/heads/main\nmark :{number + 1}\n"
            f"committer {name} <{name}@example.org> {1_770_000_000 + number * 3600} +0000\n"
            f"data {len(said)}\n{said}\n"
            + (f"from :{number}\n" if number else "")
            + f"M 100644 inline {name}.txt\ndata {len(text)}\n{text}\n"
        )
    command = ("git", "fast-import", "--quiet")
    subprocess.run(command, cwd=place, input="".join(stream), text=True, check=True)


def _churn(folder: Path, call: Call) -> Any:
    place = f"{folder}/repository"
    said = call("git.git_log", repo_path=place, max_count=_SHOWN)
    added: Counter[str] = Counter()
    for author, change in zip(
        re.findall(r"Author: (\w+)", said), re.findall(r"Commit: (\w+)", said), strict=True
    ):
        shown = call("git.git_show", repo_path=place, revision=change)
        added[author] += len(re.findall(r"^\+(?!\+)", shown, re.M))
    return added.most_common(1)[0][0]


def _orders(folder: Path) -> None:
    chance = random.Random(_CHANCE)
    rows = [
        (number, f"customer-{chance.randrange(40)}", chance.randrange(100, 90_000), "EUR")
        for number in range(_ORDERS)
    ]
    _database(folder, "orders(id integer, customer text, cents integer, currency text)", rows)


def _database(folder: Path, table: str, rows: list[tuple[Any, ...]]) -> None:
    with sqlite3.connect(folder / "data.db") as database:
        database.execute(f"create table {table}")
        marks = ", ".join("?" for _ in rows[0])
        database.executemany(f"insert into {table.partition('(')[0]} values ({marks})", rows)
    database.close()


def _export(folder: Path, call: Call) -> Any:
    rows = ast.literal_eval(call("sqlite.read_query", query="select * from orders order by id"))
    lines = [",".join(map(str, row.values())) for row in rows]
    call("files.write_file", path=f"{folder}/orders.csv", content="\n".join(lines))
    return len(lines)


def _graph(folder: Path) -> None:
    chance = random.Random(_CHANCE)
    people = [f"person {number}" for number in range(_PEOPLE)]
    entities = [
        {"type": "entity", "name": name, "entityType": "person", "observations": [
            f"works on {chance.choice(_SERVICES)}", f"joined in {chance.randrange(2010, 2026)}"
        ]}
        for name in people
    ]  # fmt: skip
    relations = [
        {"type": "relation", "from": chance.choice(people), "to": chance.choice(people),
         "relationType": "knows"}
        for _ in range(_PEOPLE // 2)
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, (*entities, *relations)))
    (folder / "memory.jsonl").write_text(text)


def _alone(_: Path, call: Call) -> Any:
    graph = json.loads(call("memory.read_graph"))
    known = {each[end] for each in graph["relations"] for end in ("from", "to")}
    return sum(each["name"] not in known for each in graph["entities"])


def _meetings(folder: Path) -> None:
    chance = random.Random(_CHANCE)
    rows = [
        (number, chance.choice(_ZONES), f"{chance.randrange(24):02}:{chance.randrange(60):02}")
        for number in range(_MEETINGS)
    ]
    _database(folder, "meetings(id integer, zone text, at text)", rows)


def _at_night(_: Path, call: Call) -> Any:
    late = 0
    for row in ast.literal_eval(call("sqlite.read_query", query="select * from meetings")):
        told = call(
            "time.convert_time", source_timezone=row["zone"], time=row["at"],
            target_timezone="Asia/Tokyo",
        )  # fmt: skip
        late += not 9 <= int(json.loads(told)["target"]["datetime"][11:13]) < 18
    return late


def _nothing(_: Path) -> None:
    """Need no data."""


def _sums(_: Path, call: Call) -> Any:
    total = 0
    for number in range(_SUMS):
        said = call("everything.get-sum", a=number, b=number * number)
        total += int(re.findall(r"\d+", said)[-1])
    return total


CHORES = (
    Chore(
        "which service fails most, by twelve logs", _logs, _errors,
        ("read a text file",), ("files.list_directory", "files.read_text_file"),
        """\
import re
from collections import Counter
from tools import files
seen = Counter()
for name in re.findall(r"day-\\d+\\.log", files.list_directory("{folder}/logs")["content"]):
    text = files.read_text_file("{folder}/logs/" + name)["content"]
    seen.update(re.findall(r"ERROR (\\w+):", text))
seen.most_common(1)[0][0]""",
    ),
    Chore(
        "who added most lines in twenty commits", _repository, _churn,
        ("git log of commits", "show a commit"), ("git.git_log", "git.git_show"),
        """\
import re
from collections import Counter
from tools import git
place = "{folder}/repository"
said = git.git_log(place, max_count=20)
added = Counter()
for author, change in zip(re.findall(r"Author: (\\w+)", said), re.findall(r"Commit: (\\w+)", said)):
    added[author] += len(re.findall(r"^\\+(?!\\+)", git.git_show(place, change), re.M))
added.most_common(1)[0][0]""",
    ),
    Chore(
        "copy five hundred orders from a database to a file", _orders, _export,
        ("query a sqlite database", "write a file"), ("sqlite.read_query", "files.write_file"),
        """\
import ast
from tools import files, sqlite
rows = ast.literal_eval(sqlite.read_query("select * from orders order by id"))
lines = [",".join(map(str, row.values())) for row in rows]
files.write_file("{folder}/orders.csv", "\\n".join(lines))
len(lines)""",
    ),
    Chore(
        "who knows nobody in a graph of 250 people", _graph, _alone,
        ("read the knowledge graph",), ("memory.read_graph",),
        """\
from tools import memory
graph = memory.read_graph()
known = {{each[end] for each in graph["relations"] for end in ("from", "to")}}
sum(each["name"] not in known for each in graph["entities"])""",
    ),
    Chore(
        "which of sixty meetings are outside of Tokyo's office hours", _meetings, _at_night,
        ("query a sqlite database", "convert time between time zones"),
        ("sqlite.read_query", "time.convert_time"),
        """\
import ast, json
from tools import sqlite, time
late = 0
for row in ast.literal_eval(sqlite.read_query("select * from meetings")):
    told = json.loads(time.convert_time(row["zone"], row["at"], "Asia/Tokyo"))
    late += not 9 <= int(told["target"]["datetime"][11:13]) < 18
late""",
    ),
    Chore(
        "fifty sums of a tool that adds two numbers", _nothing, _sums,
        ("sum of two numbers",), ("everything.get-sum",),
        """\
import re
from tools import everything
said = [everything.get_sum(number, number * number) for number in range(50)]
sum(int(re.findall(r"\\d+", each)[-1]) for each in said)""",
    ),
)  # fmt: skip
