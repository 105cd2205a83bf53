"""A server of the handshake era that does what a test wants of it, most of it wrong.  Standard library.

    fake_server.py STATE [MODE]

STATE is a folder: `tools.json` is what it lists, `starts` grows by a byte with every start, and
`cancelled` appears once a request is cancelled.
"""

import json
import os
import pathlib
import sys

STATE, MODE = pathlib.Path(sys.argv[1]), (sys.argv[2:] or ["good"])[0]


def send(message):
    line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def answer(request, result):
    if MODE == "text_ids":
        request["id"] = str(request["id"])
        hidden = {"name": "hid\u200bden", "inputSchema": {"type": "object"}}
        result["_meta"] = {"cellwright/definitions": [[hidden], []]}
    send({"id": request["id"], "result": result})


def receive():
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    return json.loads(line)


def text(words, **more):
    return {"content": [{"type": "text", "text": words}], **more}


def wait_for(method):
    while (message := receive()).get("method") != method:
        pass
    return message


def sleep_for_ever():
    while True:
        receive()


def lists(request):
    tools = json.loads((STATE / "tools.json").read_text())
    if MODE == "silent_list":
        sleep_for_ever()
    if MODE == "circle":
        return {"tools": tools, "nextCursor": "again"}
    if MODE == "endless_pages":
        cursor = int(request.get("params", {}).get("cursor", "0"))
        return {"tools": [tools[0] | {"name": f"tool{cursor}"}], "nextCursor": str(cursor + 1)}
    if MODE == "no_list":
        return {"tools": "many"}
    return {"tools": tools}


def flood():
    while True:
        send({"method": "notifications/message", "params": {"level": "info", "data": "x"}})


def endless_line():
    while True:
        os.write(1, b"x" * 65536)


def call(request):
    name, given = request["params"]["name"], request["params"].get("arguments", {})
    if name == "echo":
        return text(json.dumps(given))
    if name == "env":
        return text(json.dumps(dict(os.environ)))
    if name == "keep":
        with open(
            given["path"], "a+", opener=lambda path, flags: os.open(path, flags, 0o600)
        ) as kept:
            kept.write("x")
            kept.seek(0)
            return text(kept.read())
    if name == "where":
        return text(json.dumps([os.getpid(), os.getcwd(), os.path.exists("/etc/shadow")]))
    if name == "die":
        sys.stderr.write("Traceback\nit is broken\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "confess":
        sys.stderr.write(f"no account for {os.environ['KEY']}{'!' * given['more']}\n")
        sys.stderr.flush()
        os._exit(3)
    if name == "hang":
        (STATE / "hanging").touch()
        wait_for("notifications/cancelled")
        (STATE / "cancelled").touch()
        return text("too late")
    if name == "stuck":
        import time

        while True:
            time.sleep(60)
    if name == "deaf":
        import signal
        import subprocess

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        program = "import time; print(flush=True); time.sleep(600)"
        argv = (sys.executable, "-I", "-S", "-c", program, str(STATE))
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            answer(request, text("two"))
            child.wait()
    if name == "structured":
        return text("x", structuredContent=given["value"])
    if name == "lie":
        return text("{}", structuredContent={"n": "no number"})
    if name == "break_promise":
        return text("7")
    if name == "fail":
        return text("no\u200b such <!-- do this --> thing", isError=True)
    if name == "no_result":
        return {"content": "plenty"}
    if name == "banner":
        sys.stdout.write("Welcome!\n[1, 2\n\n{}\n")
        return text("after the banner")
    if name == "wrong_id":
        send({"id": 4711, "result": text("for somebody else")})
        send({"id": "abc", "result": text("for somebody else")})
        return text("for you")
    if name == "flood":
        flood()
    if name == "endless_line":
        endless_line()
    if name == "long_line":
        return text("x" * given["size"])
    if name == "many_parts":
        return text("x", structuredContent={"many": [[]] * given["size"]})
    if name == "progress":
        token = request["params"]["_meta"]["progressToken"]
        for done in (1, 2):
            progress = {"progressToken": token, "progress": done, "total": 2, "message": "on"}
            send({"method": "notifications/progress", "params": progress})
        return text("done")
    if name == "ask":
        form = {"message": "Sure\u202e?", "mode": "form", "requestedSchema": given["schema"]}
        send({"id": "q1", "method": "elicitation/create", "params": form})
        while (reply := receive()).get("id") != "q1":
            pass
        return text(json.dumps(reply["result"]))
    if name == "change":
        (STATE / "tools.json").write_text(json.dumps(given["tools"]))
        send({"method": "notifications/tools/list_changed"})
        return text("changed")
    if name == "blocks":
        return {"content": [
            {"type": "text", "text": "one"},
            {"type": "image", "mimeType": "image/png", "data": "aGk="},
            {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "inside"}},
            {"type": "resource_link", "uri": "file:///b", "name": "b"},
        ]}  # fmt: skip
    return text(f"unknown {name}", isError=True)


def main():
    with open(STATE / "starts", "ab") as starts:
        starts.write(b".")
    if MODE == "confess":
        sys.stderr.write(f"no account for {os.environ['KEY']}\n")
        sys.exit(1)
    if MODE == "exit":
        sys.stderr.write("no such database\n")
        sys.exit(1)
    if MODE == "silent":
        sleep_for_ever()
    if MODE == "flood_first":
        flood()
    if MODE == "endless_line_first":
        endless_line()
    version = "1999-01-01" if MODE == "version" else "2025-11-25"
    while True:
        request = receive()
        method = request.get("method")
        if method == "initialize":
            answer(request, {
                "protocolVersion": version, "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "fake", "version": "1"},
            })  # fmt: skip
        elif method == "tools/list":
            answer(request, lists(request))
        elif method == "tools/call":
            answer(request, call(request))
        elif "id" in request and method:
            send({"id": request["id"], "error": {"code": -32601, "message": "what?"}})


main()
