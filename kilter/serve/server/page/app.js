// The page's live part: asks the server for its state three times a second and shows it.
// Everything that comes from outside is put in as text, never as HTML.

import { request } from "/page/access.js";
import { count, of } from "/page/chart.js";
import { startChat } from "/page/chat.js";
import { pageMap, sparkline, stepBar, treeMap } from "/page/maps.js";

const EVERY = 333;  // milliseconds between two looks at the server
const LONGEST_WAIT = 5000;  // when it does not answer
const SMOOTH = 7;  // looks that a rate is taken over: two seconds
const HISTORY = 180;  // looks that the sparkline shows: a minute

const byId = id => document.getElementById(id);
const text = (id, value) => {
  const element = byId(id);
  if (element.textContent !== value) element.textContent = value;
};

const spark = sparkline(byId("spark"));
const batch = stepBar(byId("batch"));
const room = canvas => () => canvas.parentElement.clientHeight;
const pages = pageMap(byId("pages"), room(byId("pages")));
const tree = treeMap(byId("tree"), room(byId("tree")));

let model = "";
let failures = 0;
let timer = null;
startChat(() => model);
document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) look();
});
look();

async function look() {
  clearTimeout(timer);
  try {
    const response = await request("/state", {}, LONGEST_WAIT);
    if (!response.ok) throw new Error(`status ${response.status}`);
    show(await response.json());
    failures = 0;
  } catch {
    failures += 1;
    status("down", "the server does not answer");
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(look, Math.min(EVERY * 2 ** failures, LONGEST_WAIT));
}

function status(state, words) {
  byId("status").dataset.state = state;
  text("status", words);
}

function show(state) {
  const { stats } = state;
  model = state.model;
  text("model", model);
  document.title = `${model} – Kilter`;
  if (!state.alive) status("down", "the engine has stopped");
  else if (state.stale) status("stale", `in a long step; as of ${duration(state.age)} ago`);
  else status("live", state.draining ? "finishing, takes no new requests" : "serving");
  const updates = stats.weights_version ? [of(stats.weights_version, "weight update")] : [];
  text("facts", [`up ${duration(state.uptime)}`, ...updates, `Kilter ${state.version}`]
    .join(" · "));
  showFigures(state);
  showRequests(state);
  showStep(state);
  showPages(state);
  showTree(state);
}

// ---- figures ----

const counted = [];  // {at, tokens}, the last two seconds of looks
const rates = [];

function showFigures({ stats, latency, age, uptime }) {
  const look = { at: uptime - age, tokens: stats.completion_tokens };  // by the server's clock
  const last = counted.at(-1);
  if (last && (look.tokens < last.tokens || look.at < last.at)) counted.length = 0;  // a new server
  if (!counted.length || look.at > last.at) counted.push(look);
  while (counted.length > SMOOTH) counted.shift();
  if (counted.length > 1 && counted.at(-1) === look) {
    rates.push((look.tokens - counted[0].tokens) / (look.at - counted[0].at));
    if (rates.length > HISTORY) rates.shift();
    spark.show(rates);
    text("rate", count(Math.round(rates.at(-1))));
  }
  for (const name of ["ttft", "tpot"]) {
    if (latency[name] === null) continue;
    const [median, most] = latency[name];
    text(name, milliseconds(median));
    text(`${name}-95`, `median · p95 ${milliseconds(most)}`);
  }
  if (stats.prompt_tokens) {
    text("hits", `${Math.round(100 * stats.cached_prompt_tokens / stats.prompt_tokens)} %`);
    text("hits-of", `of ${compact(stats.prompt_tokens)} tokens`);
  }
  text("running", count(stats.running));
  text("waiting", `${count(stats.waiting)} waiting`);
  text("preemptions", of(stats.preemptions, "preemption"));
}

// ---- requests ----

const rows = new Map();  // by name
const list = byId("requests");
const nothing = document.createElement("p");
nothing.className = "empty";
nothing.textContent = "Nothing runs and nothing waits.";
const more = document.createElement("p");
more.className = "empty";

/** "7", or "7.2" for a further answer to request 7. */
const nameOf = ({ id, index }) => index ? `${id}.${index}` : `${id}`;

function showRequests({ requests, requests_total }) {
  const present = new Set();
  const wanted = requests.map(request => {
    const name = nameOf(request);
    present.add(name);
    let row = rows.get(name);
    if (!row) rows.set(name, row = makeRow(name));
    fillRow(row, request);
    return row.element;
  });
  for (const [name, row] of rows) {
    if (present.has(name)) continue;
    row.element.remove();
    rows.delete(name);
  }
  if (requests_total > requests.length) {
    more.textContent = `and ${count(requests_total - requests.length)} more that wait`;
    wanted.push(more);
  }
  if (!wanted.length) wanted.push(nothing);
  let at = list.firstElementChild;
  for (const element of wanted) {
    if (element === at) at = at.nextElementSibling;
    else list.insertBefore(element, at);
  }
  while (at !== null) {
    const next = at.nextElementSibling;
    at.remove();
    at = next;
  }
}

function makeRow(name) {
  const element = document.createElement("div");
  element.className = "row";
  element.dataset.request = name;
  const add = (parent, tag) => parent.appendChild(document.createElement(tag));
  const cells = Array.from({ length: 7 }, () => add(element, "span"));
  cells[0].textContent = name;
  cells[2].className = "bar";
  const bars = Array.from({ length: 3 }, () => add(cells[2], "i"));
  return { element, cells, bars, shown: "" };
}

function fillRow(row, request) {
  const { status, prompt_tokens, cached, computed, length, max_length } = request;
  const shown = [status, cached, computed, length, max_length].join();
  if (row.shown === shown) return;
  row.shown = shown;
  row.cells[1].textContent = status === "waiting" ? "waiting"
    : computed < prompt_tokens ? "prefill" : "decode";
  [cached, computed, length, max_length].forEach((value, i) => {
    row.cells[3 + i].textContent = count(value);
  });
  [length, computed, cached].forEach((value, i) => {
    row.bars[i].style.transform = `scaleX(${value / max_length})`;
  });
}

// ---- last step, pages, tree ----

let step = -1;

function showStep({ batch: parts, requests, stats }) {
  if (step === stats.steps) return;
  step = stats.steps;
  const known = new Map(requests.map(request => [nameOf(request), request]));
  const bar = parts.map(part => {
    // A request that has ended in the step is not listed any more: one token was a decode.
    const request = known.get(nameOf(part));
    const prefill = request?.status === "running"
      ? request.computed - part.tokens < request.prompt_tokens : part.tokens > 1;
    return { name: nameOf(part), tokens: part.tokens, prefill };
  });
  bar.sort((a, b) => a.prefill - b.prefill);
  batch.show(bar);
  const prefills = bar.filter(part => part.prefill);
  const tokens = prefills.reduce((sum, part) => sum + part.tokens, 0);
  text("decodes", `decode, ${of(bar.length - prefills.length, "token")}`);
  text("prefills", `prefill, ${of(tokens, "token")} of ${of(prefills.length, "prompt")}`);
  text("step", `step ${count(step)} · ${of(stats.last_step_tokens, "token")} in `
    + milliseconds(stats.last_step_seconds));
}

function showPages({ pages: map, stats }) {
  pages.show(map);
  const shared = map.replace(/[0c1]/g, "").length;
  const { pages_total, pages_held, pages_cached, pages_free } = stats;
  text("pages-total", `${count(pages_total)} of ${of(stats.page_size, "token")}`);
  text("pages-shared", `${count(shared)} shared`);
  text("pages-held", `${count(pages_held - shared)} held by one`);
  text("pages-cached", `${count(pages_cached)} cached`);
  text("pages-free", `${count(pages_free)} free`);
  byId("pages").ariaLabel = `${of(pages_total, "page")}: ${count(pages_held)} held, `
    + `${count(pages_cached)} cached, ${count(pages_free)} free`;
}

function showTree({ nodes, tree_pages, tree_tokens }) {
  tree.show(nodes);
  const shown = nodes.reduce((sum, node) => sum + node.tokens, 0);
  text("tree-total", (shown < tree_tokens ? `${count(shown)} of ` : "")
    + `${of(tree_tokens, "token")} on ${of(tree_pages, "page")}`);
  byId("tree").ariaLabel = `Prefix tree: ${byId("tree-total").textContent}`;
}

// ---- words ----

function milliseconds(seconds) {
  if (seconds >= 1) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  const hours = Math.floor(seconds / 3600);
  if (hours < 24) return `${hours} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function compact(n) {
  return new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(n);
}
