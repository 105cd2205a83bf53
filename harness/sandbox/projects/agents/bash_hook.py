"""The hook of Claude Code and Codex by which each shell command runs as `cellwright exec --shell LINE`.

It is copied to the agent's directory and imports nothing of cellwright.  The agent gives it a tool's
input as JSON and takes the changed input.  Whatever goes wrong ends with status 2, which blocks the
command; the model reads the reason.
"""

import json
import os
import shlex
import sys

CELLWRIGHT = "{cellwright}"
BLOCK = 2


def main() -> int:
    try:
        asked = json.load(sys.stdin)
        given = asked["tool_input"]
        command = given["command"]
        if not isinstance(command, str):
            raise TypeError("the command is no text")
        if not os.access(CELLWRIGHT, os.X_OK):
            raise FileNotFoundError(CELLWRIGHT)
        changed = {**given, "command": shlex.join([CELLWRIGHT, "exec", "--shell", command])}
        answer = {"hookEventName": "PreToolUse", "updatedInput": changed}
        if "--allow" in sys.argv:  # Codex takes a changed input only with it
            answer["permissionDecision"] = "allow"
        json.dump({"hookSpecificOutput": answer}, sys.stdout)
    except Exception as error:  # noqa: BLE001 - no error may let the command run as it is
        sys.stderr.write(f"cellwright: the command was not run: {error!r}\n")
        return BLOCK
    return 0


if __name__ == "__main__":
    sys.exit(main())
