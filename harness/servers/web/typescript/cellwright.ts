/**
 * A client of `cellwright web`, for TypeScript and JavaScript: one file, no dependencies, fetch.
 *
 * Every call takes an optional AbortSignal; aborting it, or leaving a stream, ends the program.
 */

export interface Program {
  code: string;
  /** default python */
  language?: string;
  stdin?: string;
  arguments?: string[];
  inputs?: Record<string, unknown>;
  /** paths below /workspace */
  files?: Record<string, string | { base64: string }>;
  env?: Record<string, string>;
  /** seconds */
  timeout?: number;
  /** globs of files to return */
  collect?: string[];
  packages?: string[];
  plain?: boolean;
}

export interface Execution {
  status: string;
  reason: string;
  ok: boolean;
  stdout: string;
  stderr: string;
  value: unknown;
  error: string;
  exit_code: number | null;
  wall_seconds: number;
  cpu_seconds: number;
  memory_peak_bytes: number;
  violations: { syscall: string; arguments: string[]; rule: string; process: string; count: number }[];
  files: WorkspaceFile[];
  returned: { path: string; mime: string; base64: string }[];
  truncated: Record<string, number>;
  notices: string[];
  layers: string[];
  execution_id: string;
  trace_id: string;
  session_lost: boolean;
}

export interface WorkspaceFile {
  path: string;
  size_bytes: number;
}

export type ExecutionEvent =
  | { type: "started" }
  | { type: "output"; stream: "stdout" | "stderr"; text: string }
  | { type: "result"; result: Execution };

export interface CodeRequest {
  sessionId?: string;
  traceId?: string;
  /** a language, or python: and the server's version; default python */
  runtime?: string;
  code: string;
  packages?: string[];
}

export interface CodeResult {
  /** 0 only if the program succeeded */
  exitCode: number;
  stdout: string;
  stderr: string;
  durationMs: number;
  /** bytes, at the peak */
  memoryUsage: number;
  status: string;
  reason: string;
  traceId: string;
}

export interface Approval {
  approval: string;
  run: string;
  client: string;
  tool: string;
  arguments: Record<string, unknown>;
  /** for a person: every argument, none hidden */
  shown: string;
  digest: string;
  description: string;
  reason: string;
  /** seconds since the epoch */
  asked: number;
  expires: number;
}

export interface Run {
  run: string;
  /** pending while calls wait for approval */
  status: string;
  result: Execution;
  approvals: Approval[];
  not_called_again: string[];
}

export interface ServerEvent {
  type: string;
  data: any;
}

/** A request that the server refused; `hint` says what to do. */
export class CellwrightError extends Error {
  readonly status: number;
  readonly title: string;
  readonly hint: string;

  constructor(problem: { status: number; title: string; detail: string; hint?: string }) {
    super(problem.detail);
    this.name = "CellwrightError";
    this.status = problem.status;
    this.title = problem.title;
    this.hint = problem.hint ?? "";
  }
}

type Signal = AbortSignal | undefined;

export class Cellwright {
  readonly #url: string;
  readonly #token: string;

  constructor(options: { url: string; token: string }) {
    this.#url = options.url.replace(/\/+$/, "");
    this.#token = options.token;
  }

  /** Run a program of a thin plugin; those with the same sessionId share variables and files. */
  runCode(request: CodeRequest, signal?: Signal): Promise<CodeResult> {
    return this.#json("POST", "/v1/run-code", request, signal);
  }

  /** Run a program in a fresh cell. */
  execute(program: Program, signal?: Signal): Promise<Execution> {
    return this.#json("POST", "/v1/executions", program, signal);
  }

  /** Run a program in a fresh cell, and get its output as it comes. */
  stream(program: Program, signal?: Signal): AsyncGenerator<ExecutionEvent, void> {
    return this.#execution("/v1/executions/stream", program, signal);
  }

  /** Open a session, whose programs share variables and files. */
  async session(options: { language?: string; packages?: string[] } = {}, signal?: Signal): Promise<Session> {
    const opened = await this.#json<{ session: string }>("POST", "/v1/sessions", options, signal);
    return this.openSession(opened.session);
  }

  /** Return a session that is open already. */
  openSession(id: string): Session {
    const path = `/v1/sessions/${encodeURIComponent(id)}`;
    return new Session(id, {
      session: (other) => this.openSession(other),
      json: (method, below, body, signal) => this.#json(method, path + below, body, signal),
      stream: (program, signal) => this.#execution(`${path}/executions/stream`, program, signal),
      content: (method, below, data, signal) => this.#content(method, path + below, data, signal),
    });
  }

  /** Find tools by what they do. */
  async tools(query = "", signal?: Signal): Promise<{ name: string; summary: string }[]> {
    const path = `/v1/tools?query=${encodeURIComponent(query)}`;
    return (await this.#json<{ tools: { name: string; summary: string }[] }>("GET", path, undefined, signal)).tools;
  }

  /** Call a tool. */
  async call(tool: string, args: Record<string, unknown> = {}, signal?: Signal): Promise<unknown> {
    const path = `/v1/tools/${encodeURIComponent(tool)}/calls`;
    return (await this.#json<{ result: unknown }>("POST", path, { arguments: args }, signal)).result;
  }

  /** Start a program whose risky calls wait for a person. */
  startRun(program: Program, signal?: Signal): Promise<Run> {
    return this.#json("POST", "/v1/runs", program, signal);
  }

  /** Go on with a run whose calls were decided on. */
  resumeRun(run: string, signal?: Signal): Promise<Run> {
    return this.#json("POST", `/v1/runs/${encodeURIComponent(run)}/resume`, undefined, signal);
  }

  /** List the calls that wait for a person. */
  async approvals(signal?: Signal): Promise<Approval[]> {
    return (await this.#json<{ approvals: Approval[] }>("GET", "/v1/approvals", undefined, signal)).approvals;
  }

  /** Approve or reject a call, as an operator. */
  async decide(approval: Approval, approve: boolean, reason = "", signal?: Signal): Promise<void> {
    const body = { approve, digest: approval.digest, reason };
    await this.#json("POST", `/v1/approvals/${encodeURIComponent(approval.approval)}`, body, signal);
  }

  /** Send any request; `body` is sent as JSON. */
  async #json<T>(method: string, path: string, body: unknown, signal: Signal): Promise<T> {
    const answer = await this.#fetch(method, path, body === undefined ? undefined : JSON.stringify(body), {
      "Content-Type": "application/json",
    }, signal);
    return (answer.status === 204 ? undefined : await answer.json()) as T;
  }

  async #content(method: string, path: string, data: Uint8Array | string | undefined, signal: Signal): Promise<Uint8Array> {
    const type: Record<string, string> = data === undefined ? {} : { "Content-Type": "application/octet-stream" };
    const answer = await this.#fetch(method, path, data as BodyInit | undefined, type, signal);
    return new Uint8Array(await answer.arrayBuffer());
  }

  async *#execution(path: string, program: Program, signal: Signal): AsyncGenerator<ExecutionEvent, void> {
    for await (const { type, data } of this.events(path, program, signal)) {
      if (type === "result") yield { type, result: data as Execution };
      else if (type === "output") yield { type, stream: data.stream, text: data.text };
      else if (type === "started") yield { type };
    }
  }

  /** Send a request that is answered by a stream of events; a problem in it is thrown. */
  async *events(path: string, body: unknown, signal?: Signal): AsyncGenerator<ServerEvent, void> {
    const aborter = new AbortController();
    const abort = () => aborter.abort(signal?.reason);
    if (signal?.aborted) abort();
    signal?.addEventListener("abort", abort);
    try {
      const answer = await this.#fetch("POST", path, JSON.stringify(body), {
        "Content-Type": "application/json",
      }, aborter.signal);
      for await (const event of eventsOf(answer.body!)) {
        if (event.type === "error") throw new CellwrightError(event.data);
        yield event;
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      aborter.abort(); // a reader that leaves early ends the program
    }
  }

  async #fetch(method: string, path: string, body: BodyInit | undefined, headers: Record<string, string>, signal: Signal): Promise<Response> {
    const answer = await fetch(this.#url + path, {
      method,
      headers: { Authorization: `Bearer ${this.#token}`, ...(body === undefined ? {} : headers) },
      ...(body === undefined ? {} : { body }),
      ...(signal === undefined ? {} : { signal }),
    });
    if (answer.ok) return answer;
    const text = await answer.text();
    const isProblem = answer.headers.get("content-type")?.startsWith("application/problem+json");
    throw new CellwrightError(
      isProblem ? JSON.parse(text) : { status: answer.status, title: "refused", detail: text.trim() || answer.statusText },
    );
  }
}

interface Requests {
  session(id: string): Session;
  json<T>(method: string, path: string, body: unknown, signal: Signal): Promise<T>;
  stream(program: Program, signal: Signal): AsyncGenerator<ExecutionEvent, void>;
  content(method: string, path: string, data: Uint8Array | string | undefined, signal: Signal): Promise<Uint8Array>;
}

/** A cell that keeps variables and files from one program to the next. */
export class Session {
  readonly id: string;
  readonly #requests: Requests;

  constructor(id: string, requests: Requests) {
    this.id = id;
    this.#requests = requests;
  }

  execute(program: Program, signal?: Signal): Promise<Execution> {
    return this.#requests.json("POST", "/executions", program, signal);
  }

  stream(program: Program, signal?: Signal): AsyncGenerator<ExecutionEvent, void> {
    return this.#requests.stream(program, signal);
  }

  /** Open sessions that go on from the state of this one; raises an error if its memory cannot be copied. */
  async branch(n = 1, signal?: Signal): Promise<Session[]> {
    const made = await this.#requests.json<{ sessions: { session: string }[] }>("POST", "/branches", { n }, signal);
    return made.sessions.map((each) => this.#requests.session(each.session));
  }

  /** Keep the session on disk, without a cell, until its next request. */
  async pause(signal?: Signal): Promise<void> {
    await this.#requests.json("POST", "/pause", undefined, signal);
  }

  async files(signal?: Signal): Promise<WorkspaceFile[]> {
    return (await this.#requests.json<{ files: WorkspaceFile[] }>("GET", "/files", undefined, signal)).files;
  }

  download(path: string, signal?: Signal): Promise<Uint8Array> {
    return this.#requests.content("GET", `/files/${encodeURIComponent(path)}`, undefined, signal);
  }

  async upload(path: string, data: Uint8Array | string, signal?: Signal): Promise<void> {
    await this.#requests.content("PUT", `/files/${encodeURIComponent(path)}`, data, signal);
  }

  /** End the session. */
  async close(signal?: Signal): Promise<void> {
    await this.#requests.json("DELETE", "", undefined, signal);
  }
}

async function* eventsOf(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent, void> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const fields = new Map<string, string>();
      for (const line of text.slice(0, end).split("\n")) {
        const at = line.indexOf(": ");
        if (at > 0) fields.set(line.slice(0, at), line.slice(at + 2));
      }
      text = text.slice(end + 2);
      const data = fields.get("data");
      if (data !== undefined) yield { type: fields.get("event") ?? "", data: JSON.parse(data) };
    }
  }
}
