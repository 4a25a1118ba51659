"use strict";
// Administration on the status page, for operators and tenant admins; uses functions of page.js.

const ADMIN_EVERY_MS = 20000;
const day = (epochS) => new Date(epochS * 1000).toISOString().slice(0, 16).replace("T", " ");
const limitText = (n) => (n === null ? NO_VALUE : whole(n));
let isOperator = false;
let adminTimer = 0;

const say = (text, kind) => {
  at("admin-said").textContent = text;
  at("admin-said").className = kind ?? "soft";
};

// Runs one action and shows its outcome.
async function act(name, doing) {
  try {
    const made = await doing();
    say(`${name}: done`, "good");
    await refreshAdmin();
    return made;
  } catch (error) {
    say(`${name}: ${error.message}`, "bad");
    return null;
  }
}

// Tenants

const LIMITS = ["requests_per_minute", "tokens_per_minute", "tokens_per_month", "weight"];

function limitForm(tenant) {
  const field = (name) => h("input", { name, type: "number", min: name === "weight" ? 0.01 : 1, step: name === "weight" ? "any" : 1, value: tenant[name] ?? "", "aria-label": `${name} of ${tenant.name}`, size: 9 });
  const save = (event) => {
    const row = event.target.closest("tr");
    const value = (name) => row.querySelector(`[name=${name}]`).value;
    const limits = Object.fromEntries(LIMITS.map((name) => [name, value(name) === "" ? null : Number(value(name))]));
    act(`limits of ${tenant.name}`, () => ask(`v1/admin/tenants/${encodeURIComponent(tenant.name)}`, "PUT", limits));
  };
  return [...LIMITS.map((name) => h("td", { class: "number" }, field(name))), h("td", null, h("button", { onclick: save }, "Save"))];
}

function tenantRow(tenant) {
  const shown = LIMITS.map((name) => cell(limitText(tenant[name]), "number"));
  return h("tr", null, cell(tenant.name), isOperator ? limitForm(tenant) : [...shown, cell("")],
    cell(whole(tenant.spent_tokens), "number"), cell(whole(tenant.keys), "number"));
}

function drawLimits(found) {
  const heads = [["tenant"], ["requests/min", "number"], ["tokens/min", "number"], ["tokens/month", "number"], ["weight", "number"], [""], ["tokens this month", "number"], ["valid keys", "number"]];
  at("limits").replaceChildren(table(heads, found.data.map(tenantRow)));
}

// Keys

function showSecret(made) {
  if (!made) return;
  at("new-secret").hidden = false;
  at("new-secret").replaceChildren("Copy this key now; it is shown only once: ", h("span", { class: "code" }, made.secret));
}

function keyRow(key) {
  const rotate = () => act(`rotation of ${key.id}`, () => ask(`v1/admin/keys/${key.id}/rotate`, "POST", {})).then(showSecret);
  const end = () => confirm(`End the key ${key.id} of ${key.tenant} now? Its clients are refused from then on.`) && act(`end of ${key.id}`, () => ask(`v1/admin/keys/${key.id}/end`, "POST"));
  const forget = () => act(`deletion of ${key.id}`, () => ask(`v1/admin/keys/${key.id}`, "DELETE"));
  const until = key.expires_at_s === null ? NO_VALUE : day(key.expires_at_s);
  return h("tr", null, cell(key.id, "code"), cell(key.tenant), cell(key.name), cell(key.role), cell(key.sla_class),
    cell(key.tasks.join(", ") || "all"), cell(key.models.join(", ") || "all"), cell(day(key.created_at_s)), cell(key.is_valid ? until : `${until} (ended)`),
    h("td", null, key.is_valid ? [h("button", { onclick: rotate }, "Rotate"), " ", h("button", { onclick: end }, "End")] : h("button", { onclick: forget }, "Delete")));
}

function drawKeys(found) {
  const heads = [["id"], ["tenant"], ["name"], ["role"], ["SLA"], ["tasks"], ["models"], ["created"], ["expires"], [""]];
  at("keys").replaceChildren(found.data.length ? table(heads, found.data.map(keyRow)) : h("p", { class: "empty" }, "No API keys yet."));
}

at("key-maker").addEventListener("submit", async (event) => {
  event.preventDefault();
  const form = Object.fromEntries(new FormData(event.target));
  const names = (text) => text.split(/[\s,]+/).filter(Boolean);
  const wanted = { ...form, tasks: names(form.tasks), models: names(form.models), days: form.days === "" ? null : Number(form.days) };
  showSecret(await act("a new key", () => ask("v1/admin/keys", "POST", wanted)));
});

// Usage

function usageQuery() {
  const form = Object.fromEntries(new FormData(at("usage-form")));
  return new URLSearchParams(Object.entries(form).filter(([, value]) => value !== ""));
}

function drawUsage(found) {
  const groups = usageQuery().get("by").split(",");
  const numbers = ["requests", "prompt_tokens", "cached_prompt_tokens", "output_tokens"];
  const heads = [...groups.map((g) => [g]), ["requests", "number"], ["prompt tokens", "number"], ["cached", "number"], ["output tokens", "number"], [`cost ${found.currency}`, "number"]];
  const cost = (c) => (c === null ? NO_VALUE : c.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 }));
  const rows = found.data.map((u) => h("tr", null, groups.map((g) => cell(u[g] || NO_VALUE)), numbers.map((n) => cell(whole(u[n]), "number")), cell(cost(u.cost), "number")));
  at("usage").replaceChildren(rows.length ? table(heads, rows) : h("p", { class: "empty" }, "No usage in this period."));
}

const showUsage = async () => drawUsage(await ask(`v1/usage?${usageQuery()}`));

at("usage-form").addEventListener("submit", (event) => {
  event.preventDefault();
  showUsage().catch((error) => say(`usage: ${error.message}`, "bad"));
});
at("usage-csv").addEventListener("click", async () => {
  const answer = await fetched(`v1/usage?${usageQuery()}&format=csv`);
  if (!answer.ok) return say(`usage: the server answered ${answer.status}`, "bad");
  const url = URL.createObjectURL(await answer.blob());
  h("a", { href: url, download: "cato-usage.csv" }).click();
  return setTimeout(() => URL.revokeObjectURL(url), 10000);
});

// Changes

function difference(entry) {
  const names = [...new Set([...Object.keys(entry.before ?? {}), ...Object.keys(entry.after ?? {})])].sort();
  const text = (side, name) => JSON.stringify(side?.[name] ?? null);
  const changed = names.filter((name) => text(entry.before, name) !== text(entry.after, name));
  return changed.map((name) => `${name}: ${text(entry.before, name)} → ${text(entry.after, name)}`).join("; ");
}

function drawAudit(found) {
  const rows = found.data.map((e) => h("tr", null, cell(day(e.at_s)), cell(e.who), cell(e.action), cell(e.tenant || NO_VALUE), cell(e.target || NO_VALUE, "code"), cell(difference(e))));
  at("audit").replaceChildren(rows.length ? table([["time"], ["who"], ["action"], ["tenant"], ["target"], ["changed"]], rows) : h("p", { class: "empty" }, "No changes yet."));
}

async function refreshAdmin() {
  clearTimeout(adminTimer);
  const isTyping = at("limits").contains(document.activeElement);
  try {
    if (sessionStorage.getItem(KEY) === null) throw new Error("no key");
    const tenants = await ask("v1/admin/tenants");
    isOperator = tenants.role === "operator";
    at("key-maker").elements.tenant.disabled = !isOperator;
    if (!isTyping) drawLimits(tenants);
    const [keys, changes] = await Promise.all([ask("v1/admin/keys"), ask("v1/admin/audit"), showUsage()]);
    drawKeys(keys);
    drawAudit(changes);
    at("admin").hidden = false;
    document.body.dataset.administered = "yes";
  } catch {
    at("admin").hidden = true; // not an admin, or no key
  }
  adminTimer = setTimeout(refreshAdmin, document.hidden ? 5 * ADMIN_EVERY_MS : ADMIN_EVERY_MS);
}

document.addEventListener("signed-in", refreshAdmin);
