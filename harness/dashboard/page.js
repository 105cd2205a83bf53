"use strict";
// The page of the dashboard.  Everything that it shows may come from a hostile program: texts become text
// nodes, and no text becomes markup, a style, an address of another place, or code.

const POLL_MS = 2000; // and at least ten times as long as an answer takes
const ANSWER_MS = 30000;
const TOKEN = "cellwright token";
const byId = (id) => document.getElementById(id);

// Elements

function el(tag, options, ...children) {
  const made = document.createElement(tag);
  fill(made, options, children);
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

function fill(made, options, children) {
  for (const [name, value] of Object.entries(options ?? {})) {
    if (value === undefined || value === false || value === null) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(9)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

const p = (...children) => el("p", {}, ...children);
const soft = (...children) => el("span", { class: "soft" }, ...children);
const note = (...children) => el("p", { class: "note" }, ...children);
const mono = (text) => el("span", { class: "mono" }, text);
const link = (place, ...children) => el("a", { href: "#" + place.map(encodeURIComponent).join("/") }, ...children);
const state = (word, kind) => el("span", { class: `state ${kind}` }, word);

// Units

const missing = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const count = (value) => (isNumber(value) ? value.toLocaleString("en") : missing);

function duration(seconds) {
  if (!isNumber(seconds)) return missing;
  const value = Math.abs(seconds);
  if (value < 0.01) return `${(seconds * 1000).toFixed(2)} ms`;
  if (value < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (value < 60) return `${seconds.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (value < 172800) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} days`;
}

function bytes(value) {
  if (!isNumber(value)) return missing;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(value) < 1024 || unit === "GiB") return `${value.toFixed(unit === "B" ? 0 : 1)} ${unit}`;
    value /= 1024;
  }
}

const two = (value) => String(value).padStart(2, "0");

function clock(seconds) {
  if (!isNumber(seconds)) return missing;
  const at = new Date(seconds * 1000);
  if (Number.isNaN(at.getTime())) return missing;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return el("time", { datetime: at.toISOString() }, `${day} ${time}`);
}

function zone() {
  const minutes = -new Date().getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const size = Math.abs(minutes);
  return `UTC${minutes < 0 ? "−" : "+"}${two(Math.floor(size / 60))}:${two(size % 60)}`;
}

const short = (id) => (id.length > 12 ? id.slice(0, 12) + "…" : id);

// Tables

function table(columns, rows, empty) {
  if (!rows.length) return note(empty);
  const head = columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name));
  const lines = rows.map((cells) => el("tr", {}, cells.map((cell, place) => el("td", { class: columns[place][1] }, cell))));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines)));
}

function facts(...pairs) {
  const kept = pairs.filter(([, value]) => value !== undefined && value !== null && value !== "" && value !== missing);
  return el("dl", { class: "facts" }, kept.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function leftOut(...names) {
  const more = names.filter((name) => data.left_out[name]).map((name) => `${count(data.left_out[name])} ${name}`);
  return more.length ? note(`Not shown, because of the page's size: ${more.join(", ")}.`) : null;
}

// What a run came to

const GOOD = new Set(["ok", "completed", "returned", "live", "active", "trusted", "done", "approved"]);
const WARN = new Set(["running", "waiting", "paused", "cancelled", "frozen", "untrusted", "draft", "unknown", "unchecked", "memory"]);
const kindOf = (word) => (GOOD.has(word) ? "good" : WARN.has(word) ? "warn" : "bad");
const shownState = (word) => state(word, kindOf(word));

const refusalsOf = (run) => run.events.filter((event) => !event.allowed).length;
const callsOf = (run) => run.events.filter((event) => event.category === "tool" && event.action === "call").length;

function verdict(event) {
  if (event.category === "tool" && event.ended) return shownState(event.ended);
  if (event.action === "waiting") return shownState("waiting");
  if (!event.allowed) return state("refused", "bad");
  if (event.category === "execution" && event.action !== "start") return shownState(event.action);
  return state("allowed", "good");
}

function ruleOf(event) {
  return event.about.rule ?? event.about.why ?? event.about.reason ?? "";
}

const QUIET = new Set(["rule", "why", "reason", "execution_id", "session_id", "span"]);
const BYTES = /_bytes$/;
const SECONDS = /(^|_)seconds$/;

function aboutOf(event) {
  const pairs = Object.entries(event.about).filter(([name, value]) => !QUIET.has(name) && value !== null && value !== "");
  if (!pairs.length) return null;
  return el("details", {}, el("summary", {}, "Details"), facts(...pairs.map(([name, value]) => [name, valueOf(name, value)])));
}

function valueOf(name, value) {
  if (BYTES.test(name)) return `${bytes(value)}`;
  if (SECONDS.test(name)) return duration(value);
  return mono(typeof value === "string" ? value : JSON.stringify(value));
}

// Views

const VIEWS = {
  overview: ["Overview", overview, () => ""],
  approvals: ["Approvals", approvals, () => data.approvals.length],
  runs: ["Runs", runs, () => data.runs.length + (data.durable?.length ?? 0)],
  cells: ["Cells and sessions", cells, () => (data.cells?.length ?? 0) + data.sessions.length],
  tools: ["Tools and skills", tools, () => Math.max(data.tools?.length ?? 0, data.called_tools.length) + (data.skills?.length ?? 0)],
  network: ["Network", network, () => connections().length],
  violations: ["Violations", violations, () => allEvents("violation").length],
  chain: ["Chain", chain, () => ""],
};

let data = null;
let filter = "";
let only = "all";
let checked = null; // the chain, as the server found it when it was asked to check it

function overview() {
  const failed = data.runs.filter((run) => kindOf(run.state) === "bad").length;
  const refused = allEvents("violation").reduce((sum, [, event]) => sum + (event.about.count ?? 1), 0);
  const tiles = [
    ["Approvals", count(data.approvals.length), data.approvals.length ? link(["approvals"], "calls that wait") : "no call waits"],
    data.runs.length || data.chain ? ["Runs", count(data.runs.length), `${count(failed)} did not end well`] : null,
    data.durable ? ["Durable runs", count(data.durable.length), tally(data.durable.map((run) => run.state))] : null,
    data.chain ? ["Refusals", count(refused), "by the kernel"] : null,
    data.cells ? ["Living now", count(data.cells.length), tally(data.cells.map((cell) => cell.kind))] : null,
    data.chain ? ["Audit chain", chainState(), `${count(data.chain.records)} records`] : null,
  ].filter(Boolean);
  return [
    el("h1", {}, "Overview"),
    el("ul", { class: "tiles" }, tiles.map(([name, value, more]) =>
      el("li", {}, el("span", { class: "name" }, name), el("span", { class: "value" }, value), el("span", { class: "more" }, more)))),
    gauges(),
    curve(),
    data.runs.length ? [el("h2", {}, "Latest runs"), runTable(data.runs.slice(0, 8)), data.runs.length > 8 && p(link(["runs"], "All runs"))] : null,
    data.durable?.length && !data.runs.length ? [el("h2", {}, "Latest durable runs"), durableTable(data.durable.slice(0, 8))] : null,
  ];
}

function tally(words) {
  const counts = new Map();
  for (const word of words) counts.set(word, (counts.get(word) ?? 0) + 1);
  return [...counts].map(([word, number]) => `${number} ${word}`).join(", ") || "none";
}

function gauges() {
  if (!data.gauges?.length) return null;
  return [el("h2", {}, "Pool"), el("ul", { class: "tiles" }, data.gauges.map((gauge) =>
    el("li", {}, el("span", { class: "name" }, gauge.name),
      el("span", { class: "value" }, gauge.unit === "bytes" ? bytes(gauge.value) : count(gauge.value)),
      isNumber(gauge.most) ? [el("meter", { min: 0, max: Math.max(gauge.most, 1), value: gauge.value, "aria-label": gauge.name }),
        el("span", { class: "more" }, `of ${gauge.unit === "bytes" ? bytes(gauge.most) : count(gauge.most)}`)] : null)))];
}

function curve() {
  const points = data.curve;
  if (!points.length) return null;
  const [width, height, left, bottom] = [Math.min(640, Math.max(280, byId("main").clientWidth)), 220, 44, 34];
  const last = points[points.length - 1];
  const most = Math.max(1, ...points.map((point) => point.tools));
  const x = (tasks) => left + ((width - left - 12) * tasks) / Math.max(1, last.tasks);
  const y = (made) => height - bottom - ((height - bottom - 14) * made) / most;
  const steps = points.map((point) => `H${x(point.tasks).toFixed(1)}V${y(point.tools).toFixed(1)}`).join("");
  const line = `M${x(0)} ${y(0)}${steps}`;
  const text = (at, up, words, anchor) => svg("text", { x: at, y: up, "text-anchor": anchor }, document.createTextNode(words));
  const ticks = [...new Set([0, Math.round(most / 2), most])];
  return [el("h2", {}, "Tools made against tasks done"),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${last.tools} tools made in ${last.tasks} completed tasks` },
      ...ticks.map((tick) => svg("path", { class: "rule", d: `M${left} ${y(tick)}H${width - 12}` })),
      ...ticks.map((tick) => text(left - 8, y(tick) + 4, String(tick), "end")),
      svg("path", { class: "area", d: `${line}V${y(0)}Z` }), svg("path", { class: "line", d: line }),
      text(left, height - 16, "0", "middle"), text(width - 12, height - 16, String(last.tasks), "end"),
      text((width + left) / 2, height - 4, "completed tasks", "middle")),
    note(`${count(last.tools)} tools had been made when ${count(last.tasks)} tasks were completed. Where the line is flat, tasks were solved with tools that existed.`)];
}

function runs(id) {
  if (id) return oneRun(id);
  const kinds = [["all", "All"], ["bad", "Not ended well"], ["refused", "With refusals"], ["tools", "With tool calls"]];
  const shown = data.runs.filter((run) => isShown(run));
  return [
    el("h1", {}, "Runs"),
    el("div", { class: "tools" },
      el("label", {}, soft("Find "), el("input", { id: "filter", type: "search", value: filter, autocomplete: "off", placeholder: "id, language, state, tool, rule",
        on: { input: (event) => { filter = event.target.value; draw(); } } })),
      el("label", {}, soft("Show "), el("select", { id: "only", on: { change: (event) => { only = event.target.value; draw(); } } },
        kinds.map(([value, name]) => el("option", { value, selected: value === only }, name)))),
      soft(`${count(shown.length)} of ${count(data.runs.length)}`)),
    data.durable ? [el("h2", {}, "Durable runs"), durableTable(data.durable), leftOut("durable runs")] : null,
    data.durable ? el("h2", {}, "Programs") : null,
    runTable(shown), leftOut("runs", "other records"),
    data.other.length ? el("details", {}, el("summary", {}, `${count(data.other.length)} records of no run`), eventTable(data.other, null)) : null,
  ];
}

function isShown(run) {
  if (only === "bad" && kindOf(run.state) !== "bad") return false;
  if (only === "refused" && !refusalsOf(run)) return false;
  if (only === "tools" && !callsOf(run)) return false;
  if (!filter) return true;
  const words = [run.id, run.trace_id, run.session_id, run.language, run.state, run.reason,
    ...run.events.flatMap((event) => [event.target, event.action, String(ruleOf(event))])];
  return words.join(" ").toLowerCase().includes(filter.toLowerCase());
}

function runTable(rows) {
  return table(
    [["Began", "when"], ["Run", "id"], ["Ended"], ["Reason", "text"], ["Language"], ["Wall time", "number"], ["Peak memory", "number"], ["Tool calls", "number"], ["Refused", "number"]],
    rows.map((run) => [clock(run.began), link(["runs", run.id], mono(short(run.id))), shownState(run.state), run.reason, run.language,
      duration(run.wall_seconds), bytes(run.memory_peak_bytes), count(callsOf(run)), count(refusalsOf(run))]),
    data.chain ? "No run matches." : "This file tells of no single programs; an audit trail does.");
}

function durableTable(rows) {
  return table([["Began", "when"], ["Run", "id"], ["State"], ["Language"], ["Calls", "number"], ["Ending", "text"]],
    rows.map((run) => [clock(run.began), link(["runs", run.run], mono(short(run.run))), shownState(run.state), run.language,
      count(run.calls.length + run.calls_left_out), run.ending]), "No durable run.");
}

function oneRun(id) {
  const durable = data.durable?.find((run) => run.run === id);
  if (durable) return oneDurable(durable);
  const run = data.runs.find((each) => each.id === id);
  if (!run) return [el("h1", {}, "Not found"), p("No run ", mono(id), " is in this data. ", link(["runs"], "All runs"))];
  const caused = data.runs.filter((each) => each.parent === run.id);
  return [
    note(link(["runs"], "Runs"), " / ", mono(run.id)),
    el("h1", {}, "Run ", mono(short(run.id)), " ", shownState(run.state)),
    facts(["Reason", run.reason], ["Began", clock(run.began)], ["Language", run.language], ["Wall time", duration(run.wall_seconds)],
      ["Peak memory", bytes(run.memory_peak_bytes)], ["Output", bytes(run.output_bytes)], ["Exit code", run.exit_code], ["Signal", run.signal],
      ["Session", run.session_id && mono(run.session_id)], ["Sandbox", run.sandbox_id && mono(run.sandbox_id)], ["Trace", run.trace_id && mono(run.trace_id)],
      ["Called by", run.parent && link(["runs", run.parent], mono(run.parent))],
      ["Program", run.source_sha256 && [`${bytes(run.source_bytes)}, SHA-256 `, mono(run.source_sha256)]]),
    phases(run),
    el("h2", {}, "Time line"),
    eventTable(run.events, lengthOf(run)),
    run.events_left_out ? note(`${count(run.events_left_out)} later records are not shown.`) : null,
    caused.length ? [el("h2", {}, "Runs that its tool calls caused"), runTable(caused)] : null,
  ];
}

function lengthOf(run) {
  const ends = run.events.map((event) => event.at + (event.seconds ?? 0));
  return Math.max(run.wall_seconds ?? 0, 0.000001, ...ends);
}

const PHASES = { lease: "until a cell was ready", send: "handing over the program", run: "running", reply: "counting its usage", teardown: "teardown" };

function phases(run) {
  const named = Object.entries(run.phases).filter(([name]) => name in PHASES);
  const whole = named.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!(whole > 0)) return null;
  const bar = el("div", { class: "phases", role: "img", "aria-label": "Phases: " + named.map(([name, seconds]) => `${PHASES[name]} ${duration(seconds)}`).join(", ") });
  for (const [name, seconds] of named) {
    const part = el("span", { class: `p-${name}` });
    part.style.flexGrow = String(seconds / whole);
    bar.append(part);
  }
  return [el("h2", {}, "Phases"), bar,
    el("ul", { class: "key" }, named.map(([name, seconds]) => el("li", {}, el("i", { class: `p-${name}` }), `${PHASES[name]} `, soft(duration(seconds)))))];
}

function eventTable(events, whole) {
  const columns = [[whole ? "After" : "At", whole ? "number" : "when"], ...(whole ? [["Place"]] : []), ["Record", "name"], ["What", "text"], ["Verdict"], ["Rule or reason", "text"]];
  return table(columns, events.map((event) => [
    whole ? duration(event.at) : clock(event.at), ...(whole ? [place(event, whole)] : []),
    [`${event.category} ${event.action}`, isNumber(event.seconds) ? [" ", soft(duration(event.seconds))] : null],
    [whatOf(event), aboutOf(event)], verdict(event), String(ruleOf(event)),
  ]), "No records.");
}

function whatOf(event) {
  const id = event.about.execution_id;
  if (event.category === "execution" && event.action === "start" && data.runs.some((run) => run.id === id))
    return [mono(event.target), " ", link(["runs", id], short(id))];
  const times = event.about.count > 1 ? ` ×${count(event.about.count)}` : "";
  return [mono(event.target), times];
}

function place(event, whole) {
  const mark = el("span", { class: event.action === "waiting" ? "warn" : event.allowed ? "" : "bad" });
  const at = Math.min(1, Math.max(0, event.at / whole));
  mark.style.left = `calc(${(at * 100).toFixed(2)}% - ${(at * 4).toFixed(1)}px)`;
  mark.style.width = `${(Math.min(1 - at, (event.seconds ?? 0) / whole) * 100).toFixed(2)}%`;
  return el("div", { class: "track", "aria-hidden": "true" }, mark);
}

function oneDurable(run) {
  const waiting = data.approvals.filter((each) => each.run === run.run);
  return [
    note(link(["runs"], "Runs"), " / ", mono(run.run)),
    el("h1", {}, "Durable run ", mono(short(run.run)), " ", shownState(run.state)),
    facts(["Began", clock(run.began)], ["Language", run.language], ["Ending", run.ending]),
    waiting.map(approval),
    el("h2", {}, "Calls"),
    table([["Number", "number"], ["Tool", "name"], ["State"], ["Arguments", "text"], ["Answer", "text"]],
      run.calls.map((call) => [count(call.number), mono(call.tool), shownState(call.state), el("pre", {}, call.arguments), mono(call.answer)]),
      "It called no tool."),
    run.calls_left_out ? note(`${count(run.calls_left_out)} later calls are not shown.`) : null,
  ];
}

function approvals() {
  return [
    el("h1", {}, "Approvals"),
    note("These calls wait for a person. An approval holds once, for exactly these arguments; blanks are counted and invisible characters are written as escapes."),
    data.approvals.map(approval), leftOut("calls that wait"),
    data.approvals.length ? null : p("Nothing waits."),
  ];
}

function approval(asked) {
  const left = asked.expires - Date.now() / 1000;
  const over = left <= 0 && isLive;
  const file = data.runs_file || "FILE";
  return el("section", { class: "card due", "aria-label": "Call that waits for approval" },
    el("h2", {}, mono(asked.tool)),
    asked.description ? p(asked.description) : null,
    el("pre", {}, asked.arguments),
    facts(["Client", asked.client], ["Because", asked.reason], ["Run", data.durable?.some((run) => run.run === asked.run) ? link(["runs", asked.run], mono(asked.run)) : mono(asked.run)], ["Asked", clock(asked.asked)],
      ["Expires", [clock(asked.expires), isLive && !over ? soft(`  in ${duration(left)}`) : null]]),
    isLive
      ? el("div", { class: "buttons" },
          asked.is_whole ? el("button", { class: "main", id: `approve-${asked.approval}`, disabled: over, on: { click: () => confirmDecision(asked, true) } }, "Approve…") : null,
          el("button", { id: `refuse-${asked.approval}`, disabled: over, on: { click: () => confirmDecision(asked, false) } }, "Refuse…"))
      : note("Decide with ", el("code", {}, `cellwright runs approve ${file} ${asked.approval}`), " or ", el("code", {}, "reject"), "."),
    asked.is_whole ? null : note("It cannot be approved here: its arguments are too long for a person to read."));
}

function cells() {
  return [
    el("h1", {}, "Cells and sessions"),
    data.cells ? [el("h2", {}, "Living now"), table(
      [["Id", "id"], ["Kind"], ["State"], ["Memory", "number"], ["CPU time", "number"], ["Age", "number"], ["Idle", "number"], ["Language"], ["Policy"], ["Session"]],
      data.cells.map((cell) => [mono(cell.id), cell.kind, shownState(cell.state), bytes(cell.memory_bytes), duration(cell.cpu_seconds),
        duration(cell.age_seconds), duration(cell.idle_seconds), cell.language, cell.policy, mono(cell.session)]), "Nothing lives."), leftOut("cells")] : null,
    el("h2", {}, "Sessions of the trail"),
    table([["Opened", "when"], ["Session", "id"], ["Runs", "number"], ["Ended"], ["How", "text"]],
      data.sessions.map((session) => [clock(session.opened), mono(session.id), count(session.runs), session.ended ? clock(session.ended) : state("open", "warn"), session.ending]),
      "No session is recorded."), leftOut("sessions"),
    data.sessions.filter((session) => session.events.length).map((session) =>
      [el("h2", {}, "Session ", mono(short(session.id)), " between its requests"), eventTable(session.events, lengthOf(session))]),
  ];
}

function tools() {
  return [
    el("h1", {}, "Tools and skills"), curve(),
    data.tools ? [el("h2", {}, "Registry"), table(
      [["Tool", "name"], ["Version", "number"], ["State"], ["Owner"], ["Uses", "number"], ["Failures", "number"], ["Made", "when"], ["Description", "text"]],
      data.tools.map((tool) => [[mono(tool.name), tool.risky ? [" ", state("needs approval", "warn")] : null], count(tool.version), shownState(tool.state),
        tool.maker ? `${tool.owner} (${tool.maker})` : tool.owner, count(tool.uses), share(tool.failures, tool.uses), clock(Date.parse(tool.created_at) / 1000), tool.description]),
      "The registry is empty."), leftOut("tools")] : null,
    data.called_tools.length ? [el("h2", {}, "Calls in the trail"), table(
      [["Tool", "name"], ["Calls", "number"], ["Failed", "number"], ["Refused", "number"], ["Waited for approval", "number"]],
      data.called_tools.map((tool) => [mono(tool.name), count(tool.calls), share(tool.failed, tool.calls), count(tool.refused), count(tool.waited)]), ""), leftOut("names of called tools")] : null,
    data.skills ? [el("h2", {}, "Skills"), table(
      [["Skill", "name"], ["State"], ["Version", "number"], ["Uses", "number"], ["Failures", "number"], ["Last used", "when"], ["Description", "text"]],
      data.skills.map((skill) => [mono(skill.name), shownState(skill.state), skill.version ? count(skill.version) : missing, count(skill.uses), count(skill.failures), clock(skill.used), skill.description]),
      "No skills were found."), leftOut("skills")] : null,
    data.tools || data.called_tools.length || data.skills ? null : note("No tool is known from these files."),
  ];
}

function share(part, whole) {
  if (!part || !whole) return count(part);
  return el("span", { class: part / whole > 0.2 ? "bad" : "" }, `${count(part)} (${Math.round((100 * part) / whole)} %)`);
}

function allEvents(category) {
  const found = [];
  for (const run of data.runs) for (const event of run.events) if (event.category === category) found.push([run, event]);
  for (const session of data.sessions) for (const event of session.events) if (event.category === category) found.push([session, event]);
  return found;
}

const connections = () => allEvents("network").filter(([, event]) => event.action === "connection");
const isRun = (owner) => "state" in owner;
const causeOf = (owner) => (isRun(owner) ? link(["runs", owner.id], mono(short(owner.id))) : ["session ", mono(short(owner.id))]);

function network() {
  const rules = data.other.filter((event) => event.category === "network");
  return [
    el("h1", {}, "Network"),
    table([["At", "when"], ["By", "id"], ["Host and port", "text"], ["Address", "name"], ["Rule", "text"], ["Outcome"], ["Sent", "number"], ["Received", "number"], ["Open for", "number"]],
      connections().map(([owner, event]) => [clock((owner.began ?? owner.opened) + event.at), causeOf(owner), mono(event.target), mono(event.about.address ?? ""),
        event.about.rule ?? "", event.about.outcome ?? "", bytes(event.about.sent_bytes), bytes(event.about.received_bytes), duration(event.about.seconds)]),
      "No connection is recorded."),
    rules.length ? [el("h2", {}, "Changes of rules"), eventTable(rules, null)] : null,
  ];
}

function violations() {
  return [
    el("h1", {}, "Violations"), note("Attempts that the kernel refused, as the kernel told them; the program cannot change these records."),
    table([["At", "when"], ["By", "id"], ["System call", "name"], ["Arguments", "text"], ["Rule", "text"], ["Process"], ["Times", "number"]],
      allEvents("violation").map(([owner, event]) => [clock((owner.began ?? owner.opened) + event.at), causeOf(owner), mono(event.action), mono(event.target),
        event.about.rule ?? "", event.about.process ?? "", count(event.about.count ?? 1)]), "No violation is recorded."),
  ];
}

const chainNow = () => (checked && data.chain ? { ...data.chain, state: checked.state, broken: checked.broken } : data.chain);

function chainState() {
  const words = { intact: "intact", broken: "broken", unchecked: "unchecked", memory: "no file" };
  const found = chainNow().state;
  return el("span", { class: found === "intact" ? "good" : found === "broken" ? "bad" : "warn" }, words[found] ?? "unknown");
}

const CHAIN = {
  intact: "Every record follows the one before it and has the hash of its own words.",
  broken: "A record was changed, removed or torn. Records after this place prove nothing.",
  unchecked: "The server tells this head. Nobody has read the file again.",
  memory: "The server writes no trail. With --audit FILE it does, with a chain of hashes.",
};

function chain() {
  const about = chainNow();
  if (!about) return [el("h1", {}, "Chain"), note("These data hold no audit trail.")];
  const counts = Object.entries(data.counts);
  return [
    el("h1", {}, "Audit chain: ", chainState()), p(CHAIN[about.state] ?? ""),
    isLive && about.state !== "memory" ? el("div", { class: "buttons" }, el("button", { id: "check", on: { click: checkChain } }, "Check the file now")) : null,
    about.broken ? el("pre", {}, about.broken) : null,
    facts(["Records", count(about.records)], ["Checked", checked && [clock(checked.at), `, ${count(checked.records)} records`]], ["First record", count(about.first)],
      ["Head", [count(about.head_seq), about.head_hash ? [":", mono(about.head_hash)] : null]],
      ["Hash", about.state === "memory" ? "" : about.has_key ? "HMAC-SHA-256, checked with the key" : "SHA-256 without a key: who can write the file can write a new chain"]),
    about.first > 1 ? note("Earlier records are not in these files.") : null,
    about.state === "intact" ? note("Keep the head elsewhere: a trail that was cut or rewritten later does not have it.") : null,
    counts.length ? [el("h2", {}, "Records by kind"), table([["Record", "name"], ["Count", "number"]], counts.sort((a, b) => b[1] - a[1]).map(([name, number]) => [mono(name), count(number)]), "")] : null,
  ];
}

// Drawing

function draw() {
  const [view, id] = whereTo();
  const [name, show] = VIEWS[view];
  document.title = `${name} · cellwright`;
  drawHead(view);
  keepingFocus(() => fillAnew(byId("main"), show(id)));
}

function drawHead(view) {
  byId("source").replaceChildren(`${data.name} · as of `, clock(data.made), ` · times in ${zone()}`);
  byId("views").replaceChildren(el("ul", {}, Object.entries(VIEWS).map(([key, [title, , number]]) =>
    el("li", {}, el("a", { href: `#${key}`, "aria-current": key === view && "page" }, title, badge(key, number()))))));
}

function badge(key, number) {
  if (number === "") return null;
  return el("span", { class: key === "approvals" && number ? "due" : "number" }, count(number));
}

function keepingFocus(act) {
  const before = document.activeElement;
  const [start, end] = before?.id === "filter" ? [before.selectionStart, before.selectionEnd] : [];
  const opened = [...document.querySelectorAll("main details")].map((each) => each.open);
  act();
  [...document.querySelectorAll("main details")].forEach((each, place) => { each.open = opened[place] ?? false; });
  const after = before?.id && before.id !== "main" ? byId(before.id) : null;
  if (!after || after === before) return;
  after.focus({ preventScroll: true });
  if (start !== undefined) after.setSelectionRange(start, end);
}

function whereTo() {
  const parts = location.hash.slice(1).split("/");
  let id = "";
  try { id = decodeURIComponent(parts.slice(1).join("/")); } catch { /* not ours */ }
  return [Object.hasOwn(VIEWS, parts[0]) ? parts[0] : "overview", id];
}

function tell(words, isBad) {
  byId("status").textContent = words;
  byId("status").className = isBad ? "bad" : "";
}

// Live: the data of the server that the page came from

const given = JSON.parse(byId("data").textContent);
const isLive = given === null;
let token = "";
let drawn = ""; // what is drawn, without what changes at every poll
let isPressed = false; // a button that is drawn again while it is pressed would lose the click

// The token comes in the fragment of the address, which no browser sends anywhere; it leaves the address at
// once, and stays in this tab alone, in a storage that only pages of this server can read.
function takeToken() {
  const found = /^#token=([\x21-\x7e]+)$/.exec(location.hash);
  if (found) {
    sessionStorage.setItem(TOKEN, found[1]);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(TOKEN) ?? "";
}

async function ask(path, body) {
  const headers = { authorization: `Bearer ${token}` };
  const options = { headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(ANSWER_MS) };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body), headers: { ...headers, "content-type": "application/json" } });
  const answer = await fetch(path, options);
  if (answer.status === 401 || answer.status === 403) askForToken(answer.status === 401 ? "The server does not know this token." : "This token is not that of an operator.");
  return answer;
}

async function refresh() {
  try {
    const answer = await ask("/v1/dashboard");
    if (answer.ok) return show(await answer.json());
    if (token) tell(`The server answers ${answer.status}.`, true);
  } catch {
    tell("The server does not answer.", true);
  }
}

function show(next) {
  data = next;
  const [view] = whereTo();
  const isMoving = view === "cells" || view === "overview" || view === "approvals";
  const fixed = JSON.stringify({ ...data, made: 0, cells: isMoving ? data.cells : null });
  tell("live", false);
  if (isPressed || !getSelection().isCollapsed || (fixed === drawn && !isMoving)) return drawHead(view);
  drawn = fixed;
  draw();
}

function askForToken(why) {
  token = "";
  data = null;
  sessionStorage.removeItem(TOKEN);
  tell("", false);
  byId("views").replaceChildren();
  const input = el("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const open = (event) => {
    event.preventDefault();
    if (!/^[\x21-\x7e]+$/.test(input.value.trim())) return;
    token = input.value.trim();
    sessionStorage.setItem(TOKEN, token);
    refresh();
  };
  byId("main").replaceChildren(el("h1", {}, "Token"), p(why, " The server prints a token when it starts, or has a file of tokens. This tab keeps yours until it is closed."),
    el("form", { class: "token", on: { submit: open } }, el("label", {}, "Token of an operator", input), el("button", { class: "main" }, "Open")));
  input.focus();
}

function confirmDecision(asked, approve) {
  const dialog = byId("dialog");
  const why = el("input", { type: "text", id: "why", maxlength: 500, autocomplete: "off" });
  const go = el("button", { class: "main", id: "decide", on: { click: () => decide(asked, approve, why.value) } }, approve ? "Approve once" : "Refuse");
  fillAnew(dialog,
    el("h1", { id: "question" }, approve ? "Approve this one call of " : "Refuse this call of ", mono(asked.tool), "?"),
    el("pre", {}, asked.arguments), facts(["Client", asked.client], ["Because", asked.reason], ["Run", mono(asked.run)]),
    approve ? note("It holds once, for exactly these arguments. The run goes on when it is resumed.") : el("label", {}, "The reason that the program gets", why),
    el("div", { class: "buttons" }, el("button", { id: "cancel", autofocus: true, on: { click: () => dialog.close() } }, "Cancel"), go));
  dialog.showModal();
}

function fillAnew(parent, ...children) {
  parent.replaceChildren();
  fill(parent, {}, children);
}

async function decide(asked, approve, why) {
  byId("decide").disabled = true;
  let words = "The server does not answer: look whether the call still waits.";
  let isDone = false;
  try {
    const answer = await ask(`/v1/approvals/${encodeURIComponent(asked.approval)}`, { digest: asked.digest, approve, reason: why });
    isDone = answer.ok;
    words = isDone ? (approve ? "Approved, once." : "Refused.") : `Not decided: ${(await answer.json()).detail ?? answer.status}`;
  } catch { /* it is told below */ }
  byId("dialog").close();
  if (!token) return;
  await refresh();
  tell(words, !isDone);
}

async function checkChain() {
  const button = byId("check");
  button.disabled = true;
  try {
    const answer = await ask("/v1/dashboard/chain");
    if (answer.ok) checked = await answer.json();
  } catch {
    tell("The server does not answer.", true);
  }
  if (data) draw();
}

async function keepFresh() {
  for (;;) {
    const began = performance.now();
    if (token && !document.hidden) await refresh();
    const took = performance.now() - began;
    await new Promise((then) => setTimeout(then, Math.max(POLL_MS, 10 * took)));
  }
}

addEventListener("pointerdown", () => { isPressed = true; });
for (const name of ["pointerup", "pointercancel", "blur"]) addEventListener(name, () => { isPressed = false; });

addEventListener("hashchange", () => {
  if (isLive && location.hash.startsWith("#token=")) {
    token = takeToken();
    return void refresh();
  }
  if (!data) return;
  if (location.hash === "#main") return void byId("main").focus();
  draw();
  scrollTo(0, 0);
  byId("main").focus({ preventScroll: true });
});

if (isLive) {
  token = takeToken();
  if (!token) askForToken("This server shows its data to operators only.");
  keepFresh();
} else {
  data = given;
  draw();
}
