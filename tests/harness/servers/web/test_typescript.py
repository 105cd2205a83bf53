"""The client for TypeScript: tsc accepts it, and node runs it against a server."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import NODE_MODULES, ROOT, newer_node
from tests.harness.servers.web.web_servers import ANN, BOUND_SECONDS, EVE, PAID, web_server

FOLDER = ROOT / "harness" / "servers" / "web" / "typescript"
# The few names of node that the files use; its real types are a package of their own.
NODE_TYPES = "declare const process: { env: Record<string, string | undefined> };\n"

USE = """
import { Cellwright, CellwrightError } from "./cellwright.ts";
import { pythonTool } from "./plugin.ts";

const url = process.env.CELLWRIGHT_URL;
const client = new Cellwright({ url, token: process.env.CELLWRIGHT_WEB_TOKEN });
const operator = new Cellwright({ url, token: process.env.OPERATOR_TOKEN });
const say = (...words) => console.log(words.map((each) => JSON.stringify(each)).join(" "));

const agent = { sessionId: "s", traceId: "t" };
say("plugin", (await pythonTool.execute(agent, { code: "n = 41" })).success);
say("plugin", (await pythonTool.execute(agent, { code: "print(n + 1)" })).output);
say("plugin", (await pythonTool.execute(agent, { code: "1/0" })).success);

const found = await client.execute({ code: "6 * 7", files: { "a.bin": { base64: "AAE=" } } });
say("execute", found.ok, found.value);

let text = "";
for await (const event of client.stream({ code: "for n in range(3): print(n, 'ä', flush=True)" })) {
  if (event.type === "output") text += event.text;
  if (event.type === "result") say("stream", text, event.result.ok);
}
for await (const event of client.stream({ code: "while True: print('x', flush=True)" })) {
  if (event.type === "output") break;
}
say("left", true);

const aborter = new AbortController();
setTimeout(() => aborter.abort(), 200);
await client.execute({ code: "while True: pass" }, aborter.signal).catch((error) => say("aborted", error.name));

const session = await client.session();
await session.upload("in/a.bin", new Uint8Array([0, 255]));
await session.execute({ code: "open('out.bin', 'wb').write(open('in/a.bin', 'rb').read())" });
say("session", [...(await session.download("out.bin"))], (await session.files()).length);
await session.execute({ code: "n = 41" });
await session.pause();
const [branch] = await session.branch(1);
say("branch", (await branch.execute({ code: "n + 1" })).value, branch.id !== session.id);
await branch.close();
await session.close();
await session.execute({ code: "1" }).catch((error) => say("closed", error instanceof CellwrightError, error.status));

say("tools", (await client.tools("add numbers"))[0].name, await client.call("add", { a: 1, b: 2 }));
const run = await client.startRun({ code: "import tools; print(tools.pay('ann', 3))" });
say("run", run.status, run.approvals[0].arguments);
await operator.decide((await operator.approvals())[0], true);
say("resumed", (await client.resumeRun(run.run)).result.stdout);

const stranger = new Cellwright({ url, token: "nobody-has-this-token" });
await stranger.execute({ code: "1" }).catch((error) => say("stranger", error.status, error.message));
await client.execute({ code: "1", timeout: 1e4 }).catch((error) => say("refused", error.status, error.title));
"""
SAID = """\
"plugin" true
"plugin" "42\\n"
"plugin" false
"execute" true 42
"stream" "0 ä\\n1 ä\\n2 ä\\n" true
"left" true
"aborted" "AbortError"
"session" [0,255] 2
"branch" 42 true
"closed" true 404
"tools" "add" 3
"run" "pending" {"to":"ann","amount":3}
"resumed" "paid 3 to ann\\n"
"stranger" 401 "a token is required"
"refused" 422 "invalid"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for each in FOLDER.glob("*.ts"):
        shutil.copy(each, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path


@pytest.mark.needs("tsc")
def test_tsc_accepts_the_client_and_the_plugin(folder: Path) -> None:
    (folder / "node.d.ts").write_text(NODE_TYPES)
    compiler = str(NODE_MODULES / "typescript" / "bin" / "tsc")
    options = [
        "--strict", "--noEmit", "--target", "es2022", "--module", "nodenext",
        "--lib", "es2022,dom,dom.asynciterable", "--exactOptionalPropertyTypes",
        "--allowImportingTsExtensions", "--erasableSyntaxOnly", "--noUncheckedIndexedAccess",
    ]  # fmt: skip
    done = subprocess.run(
        [newer_node() or "node", compiler, *options, "cellwright.ts", "plugin.ts", "node.d.ts"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")


def test_the_plugin_is_twenty_lines() -> None:
    lines = (FOLDER / "plugin.ts").read_text().splitlines()
    assert len([each for each in lines if each and not each.startswith("//")]) <= 20


@pytest.mark.needs("userns", "newer_node")
def test_node_runs_the_client_against_a_server(folder: Path) -> None:
    PAID.clear()
    (folder / "use.ts").write_text(USE)
    with web_server() as web:
        env = {
            "PATH": os.environ["PATH"], "CELLWRIGHT_URL": web.url, "CELLWRIGHT_WEB_TOKEN": ANN,
            "OPERATOR_TOKEN": EVE,
        }  # fmt: skip
        done = subprocess.run(
            [newer_node(), "--no-warnings", "use.ts"], cwd=folder, env=env, capture_output=True, text=True,
            timeout=2 * BOUND_SECONDS, check=False,
        )  # fmt: skip
    assert (done.stdout, done.stderr) == (SAID, "")
    assert PAID == [("ann", 3)]
