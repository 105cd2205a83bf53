"use strict";
// Runs programs in a cell and says what each came to, in a Finished frame on descriptor 3: see
// runner/messages.py.  Given: the language, and the path of what one program is given, as JSON; without
// a path, programs come on descriptor 3, one after the other, as runner/requests/forms.py puts them.
(() => {
  const [language, given] = process.argv.slice(1);
  const fs = require("fs"), vm = require("vm"), util = require("util"), path = require("path");
  const nil = Buffer.from([0xc0]);
  const marked = (mark, number) => {
    const head = Buffer.alloc(5);
    head[0] = mark;
    head.writeUInt32BE(number, 1);
    return head;
  };
  const sized = (mark, data) => Buffer.concat([marked(mark, data.length), data]); // msgpack: bin 32 or str 32
  const text = (string) => (string === null ? nil : sized(0xdb, Buffer.from(string)));
  const fit = (string, bytes) => Buffer.from(string).subarray(0, bytes).toString().replace(/\ufffd+$/, "");
  const PACKET = 65536; // channel.PACKET_BYTES
  const post = (frame) => {
    const size = PACKET - 1; // less the mark
    for (let start = 0; start < frame.length; start += size) {
      const more = start + size < frame.length ? 1 : 0;
      fs.writeSync(3, Buffer.concat([Buffer.from([more]), frame.subarray(start, start + size)]));
    }
  };
  const send = ({ value = null, representation = null, dropped = 0, error = null, trace = null, well = 0xc2, code = 0, nonce = "" }) => {
    const frame = Buffer.concat([
      Buffer.from([0x9a]), text("Finished"), value === null ? nil : sized(0xc6, value),
      text(representation), text(error), text(trace), Buffer.from([well, 0x90]), text(nonce), Buffer.from([0xcc, code]),
      marked(0xce, Math.min(dropped, 0xffffffff)), // uint 32
    ]);
    try { post(frame); } catch { } // the program may have closed it
  };
  const failure = (error) => {
    const isError = error instanceof Error || (error && error.stack !== undefined);
    const ours = /^\s+at .*(\[eval\]|\(?node:)/; // lines of the harness and of node itself
    const lines = isError ? String(error.stack).split("\n").filter((line) => !ours.test(line)) : [];
    // Of causes the message alone: `TypeError: fetch failed` tells nothing without it.
    const causes = [];
    for (let each = isError && error.cause; each && each.message && causes.length < 5; each = each.cause) {
      causes.push(`${each.name}: ${each.message}`);
    }
    const stack = isError ? [...lines, ...causes.map((each) => `  [cause]: ${each}`)].join("\n") : `Uncaught ${util.inspect(error)}`;
    const summary = isError ? [`${error.name}: ${error.message}`, ...causes].join(": ") : stack;
    fs.writeSync(2, stack + "\n");
    return { error: fit(summary, 1000), trace: fit(stack, 50000), code: 1 };
  };
  const told = (value, limit) => {
    if (value === undefined || value === null) return {};
    const kind = typeof value === "object" ? Object.getPrototypeOf(value) : null;
    const plain = [null, Object.prototype, Array.prototype].includes(kind) || typeof value.toJSON === "function";
    let json;
    try { json = plain && typeof value !== "function" ? JSON.stringify(value) : undefined; } catch { json = undefined; }
    if (json !== undefined && Buffer.byteLength(json) <= limit) return { value: Buffer.from(json) };
    const shown = util.inspect(value);
    const cut = fit(shown, limit);
    return { representation: cut, dropped: Buffer.byteLength(shown) - Buffer.byteLength(cut) };
  };
  const stripped = (source, filename) => {
    if (language !== "typescript") return source;
    const strip = require("module").stripTypeScriptTypes;
    try {
      try {
        return strip(source); // blanks in place of types: lines and columns stay
      } catch (error) {
        if (error.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw error;
        return strip(source, { mode: "transform" }); // an enum, a namespace
      }
    } catch (error) {
      if (String(error.stack).startsWith(":")) error.stack = filename + error.stack;
      throw error;
    }
  };
  const run = (source, filename, breakOnSigint) => {
    const importModuleDynamically = vm.constants && vm.constants.USE_MAIN_CONTEXT_DEFAULT_LOADER;
    return vm.runInThisContext(stripped(source, filename), { filename, importModuleDynamically, breakOnSigint });
  };

  const packet = Buffer.alloc(PACKET + 1); // once: clearing it for every call would take longer than the call
  const receive = () => {
    const pieces = [];
    for (let more = 1; more === 1;) {
      const size = fs.readSync(3, packet);
      if (size === 0) return null;
      more = packet[0];
      if (more !== 1 && pieces.length === 0) return packet.subarray(1, size); // until the next packet
      pieces.push(Buffer.from(packet.subarray(1, size)));
    }
    return Buffer.concat(pieces);
  };
  let unread = packet, at = 0; // a frame, and how much of it was read
  const uint = (size) => unread.readUIntBE((at += size) - size, size);
  const string = (size) => unread.toString("utf8", at, at += size);
  const item = () => { // as much of msgpack as an Answer has
    const mark = unread[at++];
    if (mark < 0x80) return mark;
    if (mark < 0xa0) return Array.from({ length: mark & 0x0f }, item);
    if (mark < 0xc0) return string(mark & 0x1f);
    if (mark === 0xc0) return null;
    if (mark <= 0xc6) return string(uint(1 << (mark - 0xc4)));
    if (mark <= 0xce) return uint(1 << (mark - 0xcc));
    return string(uint(1 << (mark - 0xd9)));
  };
  const unpacked = (frame) => {
    unread = frame;
    at = 0;
    return item();
  };
  const call = Buffer.alloc(4096); // what is short is packed in place: a buffer for each part would take longer
  const CALL = call.write("\0\x96\xa4Call\xce", "latin1");
  const packed = (mark, string, at) => { // returns where the next part begins
    const size = call.write(string, at + 5);
    call[at] = mark;
    call.writeUInt32BE(size, at + 1);
    return at + 5 + size;
  };
  const request = (number, name, given, site) => {
    if ((name.length + given.length + site.length) * 3 > 4000) { // a character has three bytes at most
      const big = Buffer.alloc(5);
      big[0] = 0xce;
      big.writeUInt32BE(number, 1);
      return post(Buffer.concat([Buffer.from([0x96]), text("Call"), big, text(name), sized(0xc6, Buffer.from(given)),
        text(site), Buffer.from([0xc3])]));
    }
    call.writeUInt32BE(number, CALL);
    const end = packed(0xdb, site, packed(0xc6, given, packed(0xdb, name, CALL + 4)));
    call[end] = 0xc3; // true: nothing else runs until the answer is read
    fs.writeSync(3, call, 0, end + 1);
  };
  let calls = 0, sites = false; // whether calls tell where in the program they stand
  const callTool = (name, args = {}) => {
    const number = ++calls;
    const site = sites ? String(new Error().stack).split("\n").filter((line) => !line.includes("[eval]"))[1] ?? "" : "";
    const given = JSON.stringify(args);
    if (given === undefined) throw new TypeError("the arguments of a tool must be an object");
    request(number, String(name), given, site.trim().slice(0, 100));
    for (;;) {
      const frame = receive();
      if (frame === null) throw new Error("the host has gone");
      const [, answered, value, kind, message] = unpacked(frame);
      if (answered !== number) continue; // to a call that was given up
      if (kind) throw Object.assign(new Error(message), { name: "ToolError", kind });
      return value === null ? null : JSON.parse(value);
    }
  };
  const offer = (request) => {
    const names = request.tools;
    sites = request.sites;
    if (!names.length) return;
    const tools = {};
    for (const name of names) {
      const steps = name.split("."), last = steps.pop();
      const at = steps.reduce((place, step) => (place[step] ??= {}), tools);
      at[last] = Object.assign((args) => callTool(name, args), at[last]);
    }
    Object.assign(globalThis, { callTool, tools });
  };

  const once = () => {
    const request = JSON.parse(fs.readFileSync(given, "utf8"));
    const { path, inputs, environment, limit, arguments: words } = request;
    fs.unlinkSync(given);
    const failed = (error) => { send(failure(error)); process.exit(1); };
    process.on("uncaughtException", failed);
    Object.assign(process.env, environment);
    Object.assign(globalThis, inputs);
    offer(request);
    process.argv.splice(1, process.argv.length, path, ...words);
    const settle = (value) => process.once("beforeExit", () => send(told(value, limit)));
    try {
      Promise.resolve(run(fs.readFileSync(path, "utf8"), path)).then(settle, failed);
    } catch (error) {
      failed(error);
    }
  };

  class Exit { constructor(code) { this.code = Number(code ?? process.exitCode ?? 0) & 0xff; } }
  let give_up = null; // ends the wait for a promise
  let stdin = null; // as a stream, once it is asked for

  const write = (file, content) => { // to open a FIFO without O_NONBLOCK would wait for a reader
    const { O_WRONLY, O_CREAT, O_TRUNC, O_NONBLOCK } = fs.constants;
    const opened = fs.openSync(file, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK);
    try {
      if (!fs.fstatSync(opened).isFile()) throw new Error(`${file}: not a regular file`);
      fs.writeFileSync(opened, content);
    } finally {
      fs.closeSync(opened);
    }
  };
  const prepare = (request, contents) => {
    let at = 0;
    const content = (size) => contents.subarray(at, at += size);
    for (const [name, size, executable] of request.files) {
      const file = path.join("/workspace", name);
      fs.mkdirSync(path.dirname(file), { recursive: true });
      write(file, content(size));
      if (executable) fs.chmodSync(file, 0o700);
    }
    read_from(content(request.stdin));
    Object.assign(process.env, request.environment);
    Object.assign(globalThis, request.inputs);
    if (request.arguments.length) process.argv.splice(1, process.argv.length, "<cell>", ...request.arguments);
    offer(request);
  };
  const read_from = (data) => { // what is opened has the lowest number that is free
    const file = data.length ? "/tmp/cell.stdin" : "/dev/null";
    if (data.length) fs.writeFileSync(file, data);
    try { fs.closeSync(0); } catch { } // the program may have done so
    fs.openSync(file, "r");
    stdin = null;
  };
  const settled = (value) => new Promise((resolve, reject) => {
    give_up = reject;
    Promise.resolve(value).then(resolve, reject);
  });
  const answer = async (request, contents) => {
    try {
      prepare(request, contents);
      const value = await settled(run(request.code, `<cell ${request.request}>`, true));
      if (value !== undefined) globalThis._ = value;
      return { ...told(value, request.limit), well: 0xc3 };
    } catch (error) {
      if (!(error instanceof Exit)) return failure(error);
      return { code: error.code, well: error.code ? 0xc2 : 0xc3 };
    } finally {
      give_up = null;
    }
  };
  const interrupted = () => Object.assign(
    new Error("Script execution was interrupted by `SIGINT`"), { code: "ERR_SCRIPT_EXECUTION_INTERRUPTED" });
  const next = () => { // between two programs everything stands still: timers, too
    const frame = receive();
    if (frame === null) process.reallyExit(0);
    const end = frame.indexOf(0x0a), request = JSON.parse(frame.subarray(0, end).toString());
    answer(request, Buffer.from(frame.subarray(end + 1))).catch(failure).then((finished) => {
      send({ ...finished, nonce: request.nonce });
      setImmediate(next);
    });
  };
  const converse = () => {
    process.argv.splice(1);
    process.exit = (code) => { throw new Exit(code); };
    process.on("uncaughtException", (error) => (give_up ? give_up(error) : failure(error)));
    process.on("SIGINT", () => give_up && give_up(interrupted())); // while one runs: breakOnSigint
    process.on("beforeExit", () => give_up && give_up(new Error("nothing is left that could settle the promise")));
    const made = () => (stdin ??= new fs.ReadStream(null, { fd: 0, autoClose: false }));
    Object.defineProperty(process, "stdin", { configurable: true, enumerable: true, get: made });
    send({ well: 0xc3 }); // it has started
    next();
  };

  const from = require("module").createRequire("/workspace/");
  Object.assign(globalThis, { require: from, module: { exports: {} }, exports: {} });
  if (given) once(); else converse();
})();
