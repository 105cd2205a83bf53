"use strict";
// Runs one program in a cell and says what it came to, in a Finished frame on descriptor 3: see
// runner/messages.py.  Given: the path of the source, inputs as JSON, the limit of the value's bytes.
(() => {
  const [path, inputs, limit] = process.argv.slice(1);
  const fs = require("fs"), vm = require("vm"), util = require("util");
  const nil = Buffer.from([0xc0]);
  const sized = (mark, data) => { // msgpack: bin 32 or str 32
    const head = Buffer.alloc(5);
    head[0] = mark;
    head.writeUInt32BE(data.length, 1);
    return Buffer.concat([head, data]);
  };
  const text = (string) => (string === null ? nil : sized(0xdb, Buffer.from(string)));
  const fit = (string, bytes) => Buffer.from(string).subarray(0, bytes).toString().replace(/\ufffd+$/, "");
  const finished = (value, representation, error, traceback) => Buffer.concat([
    Buffer.from([0x96]), text("Finished"), value === null ? nil : sized(0xc6, value),
    text(representation), text(error), text(traceback), Buffer.from([0xc2]),
  ]);
  const send = (frame) => {
    const size = 65536 - 1; // channel.PACKET_BYTES, less the mark
    for (let start = 0; start < frame.length; start += size) {
      const more = start + size < frame.length ? 1 : 0;
      try {
        fs.writeSync(3, Buffer.concat([Buffer.from([more]), frame.subarray(start, start + size)]));
      } catch { return; } // the program may have closed it
    }
  };
  const failed = (error) => {
    const isError = error instanceof Error || (error && error.stack !== undefined);
    const ours = /^\s+at .*(\[eval\]|\(?node:)/; // lines of the harness and of node itself
    const lines = isError ? String(error.stack).split("\n").filter((line) => !ours.test(line)) : [];
    const stack = isError ? lines.join("\n") : `Uncaught ${util.inspect(error)}`;
    const summary = isError ? `${error.name}: ${error.message}` : stack;
    fs.writeSync(2, stack + "\n");
    send(finished(null, null, fit(summary, 1000), fit(stack, 50000)));
    process.exit(1);
  };
  const told = (value) => {
    if (value === undefined || value === null) return finished(null, null, null, null);
    const kind = typeof value === "object" ? Object.getPrototypeOf(value) : null;
    const plain = [null, Object.prototype, Array.prototype].includes(kind) || typeof value.toJSON === "function";
    let json;
    try { json = plain && typeof value !== "function" ? JSON.stringify(value) : undefined; } catch { json = undefined; }
    if (json !== undefined && Buffer.byteLength(json) <= +limit) return finished(Buffer.from(json), null, null, null);
    return finished(null, fit(util.inspect(value), +limit), null, null);
  };
  process.on("uncaughtException", failed);
  const from = require("module").createRequire("/workspace/");
  Object.assign(globalThis, { require: from, module: { exports: {} }, exports: {} }, JSON.parse(inputs));
  process.argv.splice(1, process.argv.length, path);
  const importModuleDynamically = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
  const value = vm.runInThisContext(fs.readFileSync(path, "utf8"), { filename: path, importModuleDynamically });
  Promise.resolve(value).then((settled) => {
    process.once("beforeExit", () => send(told(settled)));
  }, failed);
})();
