"use strict";
// The status page: polls the state every two seconds and draws it. The server's text becomes text
// nodes only, never markup.

const POLL_MS = 2000;
const ANSWER_WITHIN_MS = 10000; // a server that hangs must not leave old data looking current
const KEY = "cato-key";
const THEME = "cato-theme";
const WINDOW_S = 1800;
const BIN_S = 30; // bins of the charts; the server's are shorter
const NO_VALUE = "–";

const at = (id) => document.getElementById(id);
let chosen = null; // request id of the shown receipt
let shownReceipt = null;
let timer = 0;

// Elements

function grown(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined));
  return element;
}
const h = (tag, attributes, ...children) => grown(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  grown(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function table(heads, rows) {
  const head = heads.map(([name, kind]) => h("th", { class: kind ?? null, scope: "col" }, name));
  return h("table", null, h("thead", null, h("tr", null, head)), h("tbody", null, rows));
}
const cell = (text, kind) => h("td", { class: kind ?? null }, text);

// An empty state that says what to do; every second text is code.
const empty = (kind, ...texts) =>
  h("p", { class: `${kind} empty` }, texts.map((text, i) => (i % 2 ? h("code", null, text) : text)));

// Numbers

function durationText(seconds) {
  if (seconds === null || seconds === undefined) return NO_VALUE;
  const sign = seconds < 0 ? "−" : "";
  const size = Math.abs(seconds);
  if (size < 0.9995) return `${sign}${(size * 1000).toFixed(size > 0 && size < 0.0995 ? 1 : 0)} ms`;
  if (size < 120) return `${sign}${size.toFixed(size < 9.995 ? 2 : 1)} s`;
  return `${sign}${(size / 60).toFixed(0)} min`;
}
// A number and its unit stay on one line.
const duration = (seconds) => durationText(seconds).replace(" ", "\u00a0");
const ago = (seconds) => (seconds < 99.5 ? `${Math.max(0, seconds).toFixed(0)} s ago` : `${(seconds / 60).toFixed(0)} min ago`);
const percent = (share) => {
  const value = 100 * share;
  return `${share < 1 && value > 99.9 ? "99.9" : value.toFixed(value < 99.95 && value > 0.05 ? 1 : 0)} %`;
};
const clock = (epochS) => new Date(epochS * 1000).toLocaleTimeString("en-GB");
const whole = (n) => n.toLocaleString("en-US");
function tokens(n) {
  const [size, letter] = [[1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([s]) => n >= s) ?? [1, ""];
  return `${Number((n / size).toPrecision(3))}${letter}`;
}
const short = (id) => (id.length > 14 ? `${id.slice(0, 4)}…${id.slice(-8)}` : id);
const sum = (values) => values.reduce((a, b) => a + b, 0);

const SIGNS = { ready: ["●", "good"], gone: ["✕", "bad"], dead: ["✕", "bad"] };
function state(name) {
  const [sign, kind] = SIGNS[name] ?? ["◐", "warn"];
  return h("span", { class: `state ${kind}` }, `${sign} ${name}`);
}

// Key figures

function attainment(tasks, sinceS) {
  const points = tasks.flatMap((t) => t.points).filter((p) => p.at_s >= sinceS);
  return { runs: sum(points.map((p) => p.runs)), met: sum(points.map((p) => p.met)) };
}

function figure(name, value, note, kind) {
  return h("div", { class: "card" }, h("span", null, name), h("strong", { class: kind ?? null }, value), h("span", null, note));
}

function drawFigures(now) {
  const five = attainment(now.tasks, now.now_s - 300);
  const share = five.runs ? five.met / five.runs : null;
  const scaled = new Set(now.deployments.map((d) => d.pool));
  const counted = now.pools.filter((p) => !scaled.size || scaled.has(p.name));
  const replicas = counted.flatMap((p) => p.replicas);
  const ready = replicas.filter((r) => r.state === "ready");
  const wanted = sum(now.deployments.map((d) => d.wanted)) || replicas.length;
  const least = now.pools.map((p) => p.slack_least_s).filter((s) => s !== null);
  const worst = least.length ? Math.min(...least) : null;
  const lately = now.lately;
  const cached = lately.prompt_tokens ? percent(lately.cached_prompt_tokens / lately.prompt_tokens) : NO_VALUE;
  at("figures").replaceChildren(
    figure("SLO attainment, 5 min", share === null ? NO_VALUE : percent(share), `${whole(five.met)} of ${whole(five.runs)} runs`, share !== null && share < 0.95 ? "bad" : null),
    figure("Runs, mean of 5 min", `${(five.runs / 5).toFixed(five.runs < 50 ? 1 : 0)} /min`, "that count for the SLO"),
    figure("TTFT, 5 min", `${duration(lately.ttft_p50_s)}`, `median; p95 ${duration(lately.ttft_p95_s)}`),
    figure("Output tokens, mean of 5 min", `${lately.output_tokens_per_s.toFixed(lately.output_tokens_per_s < 10 ? 1 : 0)} /s`, "over all answers"),
    figure("Prefix-cache hits, 5 min", cached, `of ${tokens(lately.prompt_tokens)} prompt tokens`),
    figure("Queued calls", whole(sum(now.pools.map((p) => p.queued))), "waiting in pools' queues"),
    figure("Batch slots in use", `${whole(sum(ready.map((r) => r.held)))} of ${whole(sum(ready.map((r) => r.slots)))}`, "of ready replicas"),
    figure("Replicas ready", `${ready.length} of ${wanted}`, "of the target", ready.length < wanted ? "bad" : null),
    figure("Least slack, 1 min", duration(worst), "left at dispatch", worst !== null && worst < 0 ? "bad" : null),
  );
}

// Fleet

function places(replica) {
  const width = 90;
  const share = replica.slots ? Math.min(1, replica.held / replica.slots) : 0;
  if (!replica.slots) return cell(`${replica.held}`, "number"); // the limit depends on the model it holds
  return h("td", { class: "number" }, h("div", { class: "places-of" },
    svg("svg", { viewBox: `0 0 ${width} 8`, height: 8, "aria-hidden": "true" },
      svg("rect", { class: "places", width, height: 8, rx: 2 }),
      svg("rect", { class: "taken", width: width * share, height: 8, rx: 2 })),
    h("span", null, `${replica.held} of ${replica.slots}`)));
}

function poolRow(pool, deployments) {
  const slack = pool.slack_median_s === null ? "no dispatch in the last minute"
    : `slack at dispatch: median ${duration(pool.slack_median_s)}, minimum ${duration(pool.slack_least_s)}`;
  const lines = deployments.map((d) =>
    h("div", { class: d.problem ? "bad" : "soft" },
      `${d.name}: ${d.running} of ${d.wanted} running` + (d.starting ? `, ${d.starting} starting` : "") +
      ` (${d.min} to ${d.max}, scaling ${d.policy}` + (d.reason ? `: ${d.reason})` : ")") +
      (d.problem ? ` — ${d.problem}` : "")));
  return h("tr", { class: "pool" }, h("td", { colspan: 7 },
    h("strong", null, pool.name), ` — ${whole(pool.queued)} waiting · ${slack} · ${whole(pool.dispatched)} dispatched, ${whole(pool.refused)} refused${pool.note ? ` · ${pool.note}` : ""}`,
    lines));
}

function replicaRow(replica) {
  const cards = replica.cards ? `${replica.cards} × ${replica.accelerator}` : replica.accelerator;
  const model = replica.model ? `${replica.model} on ${cards}` : NO_VALUE;
  const restarts = replica.restarts ? `engine restarted ${replica.restarts} times` : "";
  const isGone = replica.state === "gone";
  return h("tr", null,
    cell(short(replica.id), "code"),
    h("td", null, state(replica.state)),
    cell(replica.deployment || NO_VALUE),
    isGone ? cell(NO_VALUE, "number") : places(replica),
    cell(isGone ? NO_VALUE : duration(replica.wait_s), "number"),
    contexts(replica),
    cell([model, restarts, replica.note].filter((t) => t && t !== NO_VALUE).join("; ") || NO_VALUE));
}

function drawFleet(now) {
  const rows = now.pools.flatMap((pool) => {
    const deployments = now.deployments.filter((d) => d.pool === pool.name);
    const empty = h("tr", null, h("td", { colspan: 7, class: "soft" }, "no replica"));
    const replicas = pool.replicas.map(replicaRow);
    return [poolRow(pool, deployments), ...(replicas.length ? replicas : [empty])];
  });
  const heads = [["replica"], ["state"], ["deployment"], ["batch slots", "number"], ["expected queueing delay", "number"], ["sessions, working set", "number"], ["model, notes"]];
  at("fleet").replaceChildren(rows.length ? table(heads, rows) : empty("card", "No pools yet. Engines take a minute or two to start; ", "cato status", " shows what they wait for, and the log of ", "cato serve", " why one fails."));
}

// Rollouts

function drawRollouts(now) {
  const rows = now.rollouts.map((r) => h("tr", null,
    cell(r.name, "code"),
    cell(`${r.stable} → ${r.canary}`, "code"),
    h("td", { class: r.phase === "rolled-back" ? "bad" : "" }, r.phase),
    cell(percent(r.share), "number"),
    cell(`${whole(r.stable_counts.calls)} + ${whole(r.canary_counts.calls)}`, "number"),
    cell(r.outlook)));
  const heads = [["name"], ["stable → canary"], ["phase"], ["canary share", "number"], ["calls, stable + canary", "number"], ["outlook"]];
  at("rollouts-part").hidden = !rows.length;
  at("rollouts").replaceChildren(table(heads, rows));
}

// Sessions

function contexts(replica) {
  if (!replica.sessions) return cell(NO_VALUE, "number");
  const memory = replica.kv_tokens + replica.host_tokens;
  const isShort = replica.working_set_tokens > memory;
  const host = replica.host_tokens ? `, ${tokens(replica.host_tokens)} of it in host memory` : "";
  return h("td", { class: `number ${isShort ? "bad" : ""}` },
    `${whole(replica.sessions)} · ${tokens(replica.working_set_tokens)} of ${tokens(memory)} tokens${host}`);
}

function drawSessions(now) {
  const all = now.sessions;
  const share = (s) => (s.prompt_tokens ? percent(s.cached_prompt_tokens / s.prompt_tokens) : NO_VALUE);
  const rows = all.newest.map((s) => h("tr", null,
    cell(ago(now.now_s - s.ended_at_s), "number"),
    cell(s.session, "code"),
    cell(s.client || NO_VALUE),
    cell(whole(s.turns), "number"),
    cell(whole(s.met), "number"),
    cell(whole(s.moved), "number"),
    cell(tokens(s.prompt_tokens), "number"),
    cell(share(s), "number"),
    h("td", { class: `number ${s.slack_s !== null && s.slack_s < 0 ? "bad" : ""}` }, duration(s.slack_s)),
    cell(s.replica ? short(s.replica) : NO_VALUE, "code")));
  const heads = [["last turn", "number"], ["session"], ["client"], ["turns", "number"], ["met", "number"], ["moved", "number"], ["prompt tokens", "number"], ["cached", "number"], ["slack", "number"], ["replica"]];
  const note = h("p", { class: "legend" }, `${whole(all.count)} sessions; ${share(all)} of ${tokens(all.prompt_tokens)} prompt tokens were cached. Working sets per replica: see the fleet above.`);
  at("sessions").replaceChildren(...(rows.length ? [note, table(heads, rows)] : [empty("", "No session had a turn in the last 30 minutes. Connect an agent (files in deployments/clients/); other clients name their session with the header ", "X-CATO-Session", ".")]));
}

// Tenants

function drawTenants(now) {
  const rows = now.tenants.map((t) => h("tr", null,
    cell(t.tenant || "without a key"),
    cell(whole(t.runs), "number"),
    h("td", { class: `number ${t.runs && t.met / t.runs < 0.95 ? "bad" : ""}` }, t.runs ? percent(t.met / t.runs) : NO_VALUE),
    cell(tokens(t.prompt_tokens), "number"),
    cell(tokens(t.output_tokens), "number")));
  const heads = [["tenant"], ["runs", "number"], ["SLO attainment", "number"], ["prompt tokens", "number"], ["output tokens", "number"]];
  at("tenants").replaceChildren(rows.length ? table(heads, rows) : empty("", "No requests in the last 5 minutes. ", "cato keys create --tenant NAME", " creates a key for a team."));
}

// Attainment over time

function binned(points, fromS) {
  const bins = new Map();
  for (const p of points) {
    const i = Math.floor((p.at_s - fromS) / BIN_S);
    if (i < 0) continue;
    const bin = bins.get(i) ?? { i, runs: 0, met: 0 };
    bin.runs += p.runs;
    bin.met += p.met;
    bins.set(i, bin);
  }
  return [...bins.values()].sort((a, b) => a.i - b.i);
}

function chart(task, nowS) {
  const [width, height, left, right, top, bottom] = [390, 150, 42, 50, 8, 22];
  const fromS = nowS - WINDOW_S;
  const x = (s) => left + ((s - fromS) / WINDOW_S) * (width - left - right);
  const y = (share) => top + (1 - share) * (height - top - bottom);
  const bins = binned(task.points, fromS);
  const most = Math.max(1, ...bins.map((b) => b.runs));
  const half = ((BIN_S / WINDOW_S) * (width - left - right)) / 2;
  const middle = (b) => x(fromS + (b.i + 0.5) * BIN_S);
  const base = y(0);
  const tall = (b) => (b.runs / most) * (base - top) * 0.5;
  const path = bins.map((b, k) => `${k && bins[k - 1].i === b.i - 1 ? "L" : "M"}${middle(b).toFixed(1)},${y(b.met / b.runs).toFixed(1)}`).join("");
  const label = `${task.task}: attainment over the last 30 minutes`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    bins.map((b) => svg("rect", { class: "volume", x: (middle(b) - half + 0.5).toFixed(1), width: Math.max(1, 2 * half - 1).toFixed(1), y: (base - tall(b)).toFixed(1), height: tall(b).toFixed(1) },
      svg("title", null, `${clock(fromS + b.i * BIN_S)}: ${b.met} of ${b.runs} runs met their SLO`))),
    [0, 0.5, 1].map((share) => [
      svg("line", { class: "axis", x1: left, x2: width - right, y1: y(share), y2: y(share) }),
      svg("text", { x: left - 5, y: y(share) + 4, "text-anchor": "end" }, `${100 * share} %`)]),
    [[0, "0"], [0.5, (most * 60) / BIN_S]].map(([share, text]) =>
      svg("text", { x: width - right + 5, y: y(share) + 4 }, share ? `${whole(text)}/min` : text)),
    [30, 20, 10, 0].map((minutes) =>
      svg("text", { x: x(nowS - 60 * minutes), y: height - 6, "text-anchor": "middle" }, minutes ? `−${minutes} min` : "now")),
    svg("path", { class: "met", d: path }),
    bins.map((b) => svg("circle", { class: "point", cx: middle(b).toFixed(1), cy: y(b.met / b.runs).toFixed(1), r: 2 })));
}

function drawTasks(now) {
  const cards = now.tasks.map((task) => {
    const all = attainment([task], now.now_s - WINDOW_S);
    const share = all.met / all.runs;
    return h("div", { class: "card" },
      h("h3", null, task.task, h("span", { class: share < 0.95 ? "bad" : null }, percent(share))),
      h("div", { class: "soft" }, `${task.metric.toUpperCase()} within ${duration(task.target_s)}: ${whole(all.met)} of ${whole(all.runs)} runs`),
      chart(task, now.now_s));
  });
  const legend = h("p", { class: "legend" },
    h("span", null, swatch("point"), "attainment per 30 s (left axis)"),
    h("span", null, swatch("volume"), "runs ended (right axis)"));
  at("tasks").replaceChildren(...(cards.length ? cards : [empty("card", "No task has ended in the last 30 minutes. Try ", "cato task code-completion -i 'prefix=def add(a, b):'", " or point an editor here: deployments/clients/.")]));
  at("tasks").nextElementSibling?.remove();
  if (cards.length) at("tasks").after(legend);
}

const swatch = (kind) => svg("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, svg("rect", { class: kind, y: 1, width: 14, height: 10 }));

// Runs and receipts

// Whether a run met its SLO, as text and colour. An excused run did neither: it has no colour.
function verdict(run, missed) {
  if (run.excuse) return [`○ excused: ${run.excuse.replaceAll("_", " ")}`, ""];
  if (run.met) return ["✓ met", "good"];
  return [`✕ ${missed}`, run.status === "cancelled" ? "warn" : "bad"];
}

function runRow(run, nowS) {
  const [text, kind] = verdict(run, run.status === "done" ? "late" : run.status);
  const row = h("tr", { class: `run${run.request_id === chosen ? " chosen" : ""}`, onclick: () => choose(run.request_id) },
    cell(ago(nowS - run.ended_at_s), "number"),
    h("td", { class: "state" }, h("button", { title: run.request_id }, run.task)),
    h("td", null, h("span", { class: `state ${kind}` }, text)),
    cell(`${run.metric.toUpperCase()} ${duration(run.achieved_s)}`, "number"),
    cell(duration(run.target_s), "number"),
    cell(duration(run.queue_s), "number"));
  return row;
}

function drawRuns(now) {
  if (chosen === null && now.runs.length) choose(now.runs[0].request_id);
  const heads = [["ended", "number"], ["task"], ["SLO"], ["achieved", "number"], ["target", "number"], ["queued", "number"]];
  const rows = now.runs.map((run) => runRow(run, now.now_s));
  const focused = at("runs").contains(document.activeElement) ? document.activeElement.title : null;
  at("runs").replaceChildren(rows.length ? table(heads, rows) : empty("", "No run has ended in the last 30 minutes. Each request is a run and gets a receipt."));
  if (focused !== null) {
    [...at("runs").querySelectorAll("button")].find((b) => b.title === focused)?.focus({ preventScroll: true });
  }
  if (!now.runs.length && !chosen) at("receipt").replaceChildren(h("p", { class: "empty" }, "Choose a run to see its receipt."));
}

async function choose(id) {
  chosen = id;
  for (const row of document.querySelectorAll("tr.run")) {
    row.classList.toggle("chosen", row.querySelector("button").title === id);
  }
  if (shownReceipt === id) return;
  try {
    const receipt = await ask(`v1/requests/${encodeURIComponent(id)}`);
    if (chosen !== id) return;
    shownReceipt = id;
    at("receipt").replaceChildren(...receiptParts(receipt));
  } catch (error) {
    at("receipt").replaceChildren(h("p", { class: "empty" }, `No receipt for ${id}: ${error.message}`));
  }
}

function receiptParts(r) {
  const [text, kind] = verdict(r, "missed");
  return [
    h("div", null, h("span", { class: "code" }, r.request_id), ` · ${r.task} · ${r.status}${r.simulated ? " · simulated" : ""}`),
    h("div", null, `${r.metric.toUpperCase()} ${duration(r.achieved_s)} of ${duration(r.target_s)}: `, h("strong", { class: kind }, text),
      ` · end to end ${duration(r.e2e_s)}, of which queued ${duration(r.queue_s)}, CATO ${duration(r.overhead_s)}`),
    r.problem ? h("div", { class: r.excuse ? "soft" : "bad" }, r.problem) : null,
    waterfall(r),
    h("p", { class: "legend" },
      [["queue", "queued"], ["first", "to first token"], ["rest", "further tokens"], ["other", "not an LLM call"]]
        .map(([kind, text]) => h("span", null, swatch(kind), text)),
      h("span", null, svg("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, svg("line", { class: "budget", x1: 7, x2: 7, y1: 0, y2: 12 })), "budget of the node"),
      h("span", null, svg("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, svg("line", { class: "target", x1: 0, x2: 14, y1: 6, y2: 6 })), "target")),
    h("ul", { class: "reasons" }, r.nodes.flatMap(reasons)),
  ].filter((part) => part !== null);
}

const nodeName = (n) => n.node + (n.round > 1 ? ` round ${n.round}` : "") + (n.item === null ? "" : `[${n.item}]`);

function reasons(n) {
  const lines = [];
  const tries = n.llm?.reasons ?? [];
  tries.forEach((reason, i) => {
    const where = i === tries.length - 1 && n.llm.replica ? ` on ${short(n.llm.replica)}` : "";
    const attempt = tries.length > 1 ? `, attempt ${i + 1} of ${tries.length}` : "";
    lines.push(h("li", null, h("strong", null, `${nodeName(n)}${where}${attempt}: `), reason));
  });
  if (tries.length) {
    lines.push(h("li", { class: "soft" }, `engine ${duration(n.llm.service_s)}, predicted ${duration(n.llm.predicted_service_s)}; ` +
      `queue ${duration(n.llm.queue_s)}, predicted ${duration(n.llm.predicted_queue_s)}; ${n.llm.prompt_tokens} tokens in, ${n.llm.output_tokens} out`));
  }
  if (n.problem) lines.push(h("li", { class: "bad" }, `${nodeName(n)}: ${n.problem}`));
  return lines;
}

function ticks(end) {
  const raw = end / 4;
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((k) => k * size).find((s) => s >= raw);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

function parts(n) {
  const end = n.started_s + n.spent_s;
  if (n.kind !== "llm" || !n.llm) return [[n.status === "done" ? "other" : "none", n.started_s, end]];
  const leased = Math.min(end, n.started_s + n.llm.queue_s);
  const first = n.llm.engine_ttft_s === null ? end : Math.min(end, leased + n.llm.engine_ttft_s);
  return [["queue", n.started_s, leased], ["first", leased, first], ["rest", first, end]];
}

function waterfall(r) {
  const [width, left, right, rowHeight, top] = [600, 120, 74, 24, 20];
  const isInstant = r.metric !== "tpot";
  const end = 1.02 * Math.max(0.001, r.e2e_s, ...r.nodes.map((n) => n.started_s + n.spent_s), isInstant && r.target_s < 4 * r.e2e_s ? r.target_s : 0);
  const x = (s) => left + (s / end) * (width - left - right);
  const height = top + rowHeight * r.nodes.length + 6;
  const inMs = end < 2;
  const marks = ticks(end);
  const digits = inMs ? (marks[1] < 0.001 ? 2 : 0) : marks[1] < 1 ? 1 : 0;
  const label = (s) => `${(inMs ? s * 1000 : s).toFixed(digits)}${s === 0 ? (inMs ? " ms" : " s") : ""}`;
  const rows = r.nodes.map((n, i) => {
    const y = top + rowHeight * i;
    const name = nodeName(n);
    const budget = n.budget_s ?? n.limit_s;
    return [
      svg("text", { class: "name", x: 0, y: y + 16 }, name.length > 17 ? `${name.slice(0, 16)}…` : name, svg("title", null, name)),
      parts(n).filter(([, a, b]) => b > a || n.spent_s === 0).map(([kind, a, b]) =>
        svg("rect", { class: kind, x: x(a).toFixed(1), width: Math.max(1, x(b) - x(a)).toFixed(1), y: y + 5, height: 14 },
          svg("title", null, `${name}, ${kind}: ${duration(b - a)}`))),
      budget !== null && n.started_s + budget <= end
        ? svg("line", { class: "budget", x1: x(n.started_s + budget), x2: x(n.started_s + budget), y1: y + 2, y2: y + 22 }) : null,
      svg("text", { x: width, y: y + 16, "text-anchor": "end" }, n.status === "done" ? duration(n.spent_s) : n.status),
    ];
  });
  const target = isInstant && r.target_s <= end ? svg("line", { class: "target", x1: x(r.target_s), x2: x(r.target_s), y1: top - 4, y2: height }) : null;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "timeline of the run" },
    marks.map((s) => [
      svg("line", { class: "axis", x1: x(s), x2: x(s), y1: top - 4, y2: height }),
      svg("text", { x: x(s), y: 11, "text-anchor": "middle" }, label(s))]),
    rows, target);
}

// Decisions

const DECISIONS = { dispatch: ["→", null], refuse: ["✕", "bad"], supersede: ["↩", null], preempt: ["↩", "warn"], lost: ["✕", "bad"], load: ["⇣", null], left: ["○", null] };

function drawDecisions(now) {
  const rows = now.decisions.map((d) => {
    const [sign, kind] = DECISIONS[d.kind] ?? ["·", null];
    const isLate = d.slack_s !== null && d.slack_s < 0;
    return h("tr", null,
      cell(clock(d.at_s), "number"),
      cell(d.pool),
      h("td", null, h("span", { class: `state ${kind ?? ""}` }, `${sign} ${d.kind}`)),
      cell(d.task ? `${d.task} · ${d.node}` : NO_VALUE),
      cell(d.replica ? short(d.replica) : NO_VALUE, "code"),
      cell(duration(d.queue_s), "number"),
      h("td", { class: `number ${isLate ? "bad" : ""}` }, duration(d.slack_s)),
      cell(d.attempt > 1 ? `attempt ${d.attempt}: ${d.reason}` : d.reason));
  });
  const heads = [["time", "number"], ["pool"], ["decision"], ["task · node"], ["replica"], ["queued", "number"], ["slack", "number"], ["reason"]];
  at("decisions").replaceChildren(rows.length ? table(heads, rows) : empty("", "No decisions yet: a router decides when a call arrives."));
}

// Requests

async function fetched(path, method, body, signal) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  return fetch(path, { method: method ?? "GET", headers, body: body && JSON.stringify(body), cache: "no-store", signal });
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

async function ask(path, method, body) {
  // Only reads have a limit: after a change without an answer nobody knows whether it was made.
  const signal = method ? null : AbortSignal.timeout(ANSWER_WITHIN_MS);
  let answer, value;
  try {
    answer = await fetched(path, method, body, signal);
    value = parsed(await answer.text());
  } catch (error) {
    throw signal?.aborted ? new Error(`no answer within ${ANSWER_WITHIN_MS / 1000} s`) : error;
  }
  if (!answer.ok) {
    const error = new Error(value?.error?.message ?? `the server answered ${answer.status}`);
    error.status = answer.status;
    throw error;
  }
  return value;
}

function tell(text, kind) {
  at("health").textContent = text;
  at("health").className = kind;
}

async function refresh() {
  clearTimeout(timer);
  const hasKey = sessionStorage.getItem(KEY) !== null;
  try {
    const now = await ask("ui/state");
    for (const draw of [drawFigures, drawFleet, drawRollouts, drawTasks, drawTenants, drawSessions, drawRuns, drawDecisions]) draw(now);
    at("key-form").hidden = at("sign-in").hidden = true;
    at("main").hidden = false;
    at("forget-key").hidden = !hasKey;
    const silent = now.missing.length ? ` — no answer from: ${now.missing.join(", ")}` : "";
    const wrong = now.problem ? ` — workflow files are invalid, still using the previous ones: ${now.problem}` : "";
    const low = now.warnings.map((w) => ` — ${w}`).join("");
    const kind = silent || wrong || low ? "warn" : "good";
    tell(`${kind === "good" ? "●" : "◐"} as of ${clock(now.now_s)}${silent}${wrong}${low}`, kind);
  } catch (error) {
    const needsKey = error.status === 401 || error.status === 403;
    if (needsKey && at("key-form").hidden) {
      at("key-form").hidden = false;
      offerSignIn();
      at("main").hidden = true;
      at("key").focus();
    }
    at("forget-key").hidden = !hasKey;
    tell(`✕ ${error.message || "no answer"}`, "bad");
  }
  document.body.dataset.drawn = "yes";
  timer = setTimeout(refresh, document.hidden ? 5 * POLL_MS : POLL_MS);
}

// Sign-in: OpenID Connect authorization code flow with PKCE. The server exchanges the code.

const SIGN_IN = "cato-sign-in";
const here = () => location.origin + location.pathname;
const base64url = (bytes) => btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");

function use(key) {
  sessionStorage.setItem(KEY, key);
  document.dispatchEvent(new Event("signed-in"));
  refresh();
}

async function offerSignIn() {
  const flow = await ask("ui/sign-in").catch(() => ({}));
  at("sign-in").hidden = !flow.client_id;
}

async function signIn() {
  if (!window.crypto.subtle) return tell("✕ sign-in needs https", "bad");
  const flow = await ask("ui/sign-in");
  const [verifier, state] = [32, 16].map((n) => base64url(crypto.getRandomValues(new Uint8Array(n))));
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier));
  sessionStorage.setItem(SIGN_IN, JSON.stringify({ verifier, state }));
  const asked = new URLSearchParams({
    response_type: "code", client_id: flow.client_id, scope: flow.scope, redirect_uri: here(), state,
    code_challenge: base64url(new Uint8Array(digest)), code_challenge_method: "S256",
  });
  return location.assign(`${flow.authorization_endpoint}${flow.authorization_endpoint.includes("?") ? "&" : "?"}${asked}`);
}

async function signedIn() {
  const given = new URLSearchParams(location.search);
  const begun = JSON.parse(sessionStorage.getItem(SIGN_IN) ?? "null");
  if (!begun || !given.has("state")) return;
  sessionStorage.removeItem(SIGN_IN);
  history.replaceState(null, "", location.pathname);
  if (given.get("state") !== begun.state || !given.has("code")) return;
  const body = { code: given.get("code"), verifier: begun.verifier, redirect_uri: here() };
  const { token } = await ask("ui/sign-in", "POST", body);
  sessionStorage.setItem(KEY, token);
}

at("sign-in").addEventListener("click", () => signIn().catch((error) => tell(`✕ ${error.message}`, "bad")));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  use(at("key").value.trim());
  at("key").value = "";
});
at("forget-key").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
at("theme").value = localStorage.getItem(THEME) ?? "";
at("theme").addEventListener("change", () => {
  localStorage.setItem(THEME, at("theme").value);
  document.documentElement.dataset.theme = at("theme").value;
});
document.documentElement.dataset.theme = at("theme").value;
document.addEventListener("visibilitychange", () => document.hidden || refresh());
signedIn().catch((error) => tell(`✕ ${error.message}`, "bad")).finally(() => {
  document.dispatchEvent(new Event("signed-in"));
  refresh();
});
