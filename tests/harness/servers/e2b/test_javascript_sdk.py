"""The unmodified JavaScript SDK of E2B, against the same server."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.harness.servers.e2b.e2b_server import E2bServer

_MODULES = ROOT / ".venv" / "node" / "node_modules"

pytestmark = [
    pytest.mark.needs("cgroup"),
    pytest.mark.skipif(not (_MODULES / "@e2b").is_dir(), reason="npm installed no SDK"),
]

_PROGRAM = """
import assert from 'node:assert'
import { Sandbox, NotFoundError, CommandExitError } from '@e2b/code-interpreter'

const sandbox = await Sandbox.create({ timeoutMs: 60_000, metadata: { by: 'node' } })
const lines = []
const done = await sandbox.runCode('print("hello")\\n[1, (2, 3)]', { onStdout: (line) => lines.push(line.line) })
assert.equal(done.text, '[1, (2, 3)]')
assert.deepEqual(lines.join(''), 'hello\\n')
assert.equal((await sandbox.runCode('1/0')).error.name, 'ZeroDivisionError')

const context = await sandbox.createCodeContext()
await sandbox.runCode('x = 1', { context })
assert.equal((await sandbox.runCode('x')).error.name, 'NameError')
await sandbox.removeCodeContext(context)

await sandbox.files.write('a.txt', 'text')
assert.equal(await sandbox.files.read('a.txt'), 'text')
assert.deepEqual((await sandbox.files.list('.')).map((each) => each.name), ['a.txt'])
assert.equal(await sandbox.files.exists('nothing'), false)
await assert.rejects(sandbox.files.read('nothing'), NotFoundError)

const command = await sandbox.commands.run('cat a.txt; echo err >&2')
assert.deepEqual([command.stdout, command.stderr], ['text', 'err\\n'])
await assert.rejects(sandbox.commands.run('exit 4'), (error) => error instanceof CommandExitError && error.exitCode === 4)
const cat = await sandbox.commands.run('cat', { background: true, stdin: true })
await sandbox.commands.sendStdin(cat.pid, 'typed\\n')
await sandbox.commands.closeStdin(cat.pid)
assert.equal((await cat.wait()).stdout, 'typed\\n')

const seen = new Promise((resolve) => {
  sandbox.files.watchDir('.', (event) => event.name === 'b.txt' && resolve()).then(() => sandbox.files.write('b.txt', '1'))
})
await seen

const page = await Sandbox.list({ query: { metadata: { by: 'node' } } }).nextItems()
assert.deepEqual(page.map((each) => each.sandboxId), [sandbox.sandboxId])
const again = await Sandbox.connect(sandbox.sandboxId)
await again.setTimeout(30_000)
assert.equal((await again.runCode('40 + 2')).text, '42')
assert.equal(await sandbox.pause(), true)
await Sandbox.connect(sandbox.sandboxId)
assert.equal((await sandbox.runCode('1 + 1')).text, '2')
assert.equal(await sandbox.kill(), true)
assert.equal(await sandbox.isRunning(), false)
console.log('all of it')
process.exit(0)
"""


def test_a_program_of_its_users_runs(e2b: E2bServer, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(_MODULES)
    (tmp_path / "program.mjs").write_text(_PROGRAM)
    done = subprocess.run(
        ["node", "program.mjs"], cwd=tmp_path, env={**os.environ, **e2b.variables},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all of it\n"
