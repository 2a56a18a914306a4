// The drawings of the page: tokens per second, the last step, the page map and the prefix tree.

import { Chart, count, of } from "/page/chart.js";

/** A line over time. Data: numbers, oldest first. */
export function sparkline(canvas) {
  return new Chart(canvas, (chart, values, colours) => {
    const context = chart.surface();
    const width = canvas.clientWidth, height = canvas.clientHeight - 2;
    const top = Math.max(...values, 1e-9) * 1.1;
    const step = width / Math.max(values.length - 1, 20);
    const x = i => width - (values.length - 1 - i) * step;
    const y = value => 1 + height - height * value / top;
    context.beginPath();
    values.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.strokeStyle = colours.held;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height + 1);
    context.lineTo(x(0), height + 1);
    context.globalAlpha = 0.12;
    context.fillStyle = colours.held;
    context.fill();
    context.globalAlpha = 1;
  });
}

/** The last step as one bar. Data: [{name, tokens, prefill}]; decodes come first. */
export function stepBar(canvas) {
  let spans = [];
  const draw = (chart, batch, colours) => {
    const context = chart.surface();
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const total = batch.reduce((sum, part) => sum + part.tokens, 0);
    context.fillStyle = colours.free;
    if (!total) context.fillRect(0, 0, width, height);
    let x = 0;
    spans = batch.map(part => {
      const wide = width * part.tokens / total;
      context.fillStyle = part.prefill ? colours.work : colours.held;
      context.fillRect(x, 0, Math.max(wide - (wide > 3 ? 1 : wide > 1.5 ? 0.5 : 0), 0.5), height);
      x += wide;
      return { part, end: x };
    });
  };
  return new Chart(canvas, draw, x => {
    const hit = spans.find(span => x < span.end);
    return hit ? `Request ${hit.part.name}: ${of(hit.part.tokens, "token")} of `
      + (hit.part.prefill ? "its prompt" : "its answer") : null;
  });
}

const STATES = ["free", "cached", "held", "shared"];
const stateOf = mark => mark === "0" ? 0 : mark === "c" ? 1 : mark === "1" ? 2 : 3;

/** Every page of the KV cache as a cell. Data: a character per page: "0" free, "c" cached, else
 * how many requests hold it ("9": or more). */
export function pageMap(canvas, heightOf) {
  let grid = { columns: 1, size: 1 };
  let drawn = null;  // what the cells show: {key, states}
  const draw = (chart, pages, colours) => {
    const width = canvas.clientWidth;
    grid = fit(pages.length, width, heightOf());
    const rows = Math.ceil(pages.length / grid.columns);
    const height = rows * grid.size;
    const key = [width, grid.size, pages.length, window.devicePixelRatio, colours.free].join();
    const whole = drawn === null || drawn.key !== key;
    const context = whole ? chart.surface(height) : canvas.getContext("2d");
    const gap = grid.size >= 8 ? 2 : grid.size >= 4 ? 1 : 0;
    const cells = whole ? new Uint8Array(pages.length).fill(255) : drawn.cells;
    // Only cells that changed, and by colour: thousands of pages cost little that way.
    for (let state = 0; state < STATES.length; state++) {
      context.fillStyle = colours[STATES[state]];
      for (let i = 0; i < pages.length; i++) {
        if (cells[i] === state || stateOf(pages[i]) !== state) continue;
        cells[i] = state;
        const column = i % grid.columns, row = Math.floor(i / grid.columns);
        context.fillRect(column * grid.size, row * grid.size, grid.size - gap, grid.size - gap);
      }
    }
    drawn = { key, cells };
    Object.assign(canvas.dataset, { cells: pages.length, columns: grid.columns, size: grid.size });
  };
  return new Chart(canvas, draw, (x, y, pages) => {
    const column = Math.floor(x / grid.size);
    const page = Math.floor(y / grid.size) * grid.columns + column;
    if (column >= grid.columns || page >= pages.length || page < 0) return null;
    const mark = pages[page];
    const words = { 0: "free", c: "cached, held by none", 9: "held by 9 requests or more" };
    return `Page ${count(page)}: ${words[mark] ?? `held by ${of(Number(mark), "request")}`}`;
  });
}

/** The largest cells, 2 to 16 pixels, of which `cells` fill at most this height; past that the
 * map grows longer. */
function fit(cells, width, height) {
  for (let size = 16; size > 2; size--) {
    const columns = Math.floor(width / size);
    if (columns > 0 && Math.ceil(cells / columns) * size <= height) return { columns, size };
  }
  return { columns: Math.max(Math.floor(width / 2), 1), size: 2 };
}

/** The prefix tree, root at the left: a node is as wide as it has tokens and as high as it has
 * leaves. Data: nodes {id, parent, tokens, pages, last_used, holders}, parents before children. */
export function treeMap(canvas, heightOf) {
  let boxes = [];
  const draw = (chart, nodes, colours) => {
    const { start, leaves, top, depth, total } = shape(nodes);
    const step = Math.max(Math.min(heightOf() / Math.max(total, 1), 22), 3);
    const context = chart.surface(Math.max(total * step, 1));
    const unit = canvas.clientWidth / Math.max(depth, 1);
    const gap = step >= 6 ? 1.5 : 0.5;
    const idle = nodes.filter(node => !node.holders).map(node => node.last_used);
    idle.sort((a, b) => a - b);
    const age = new Map(idle.map((used, i) => [used, (i + 1) / idle.length]));
    boxes = nodes.map((node, i) => ({
      node, start: start[i], x: start[i] * unit, y: top[i] * step,
      width: node.tokens * unit, height: leaves[i] * step,
    }));
    for (const { node, x, y, width, height } of boxes) {
      context.globalAlpha = node.holders ? 1 : 0.35 + 0.65 * age.get(node.last_used);
      context.fillStyle = node.holders ? colours.held : colours.cached;
      context.fillRect(x, y, Math.max(width - 1.5, 1), Math.max(height - gap, 1));
    }
    context.globalAlpha = 1;
  };
  return new Chart(canvas, draw, (x, y) => {
    const hit = boxes.find(b => x >= b.x && x < b.x + b.width && y >= b.y && y < b.y + b.height);
    if (!hit) return null;
    const { node, start } = hit;
    return `${of(node.tokens, "token")} on ${of(node.pages, "page")}, after ${count(start)}\n`
      + (node.holders ? `held by ${of(node.holders, "request")}` : "can be evicted");
  });
}

/** Where nodes stand: tokens before each, leaves below it, its first leaf's place; and the most
 * tokens from a root, and all leaves. */
function shape(nodes) {
  const place = new Map(nodes.map((node, i) => [node.id, i]));
  const parent = nodes.map(node => node.parent === null ? -1 : place.get(node.parent));
  const start = new Array(nodes.length), leaves = new Array(nodes.length).fill(0);
  let depth = 0;
  nodes.forEach((node, i) => {
    const up = parent[i];
    start[i] = up < 0 ? 0 : start[up] + nodes[up].tokens;
    depth = Math.max(depth, start[i] + node.tokens);
  });
  for (let i = nodes.length - 1; i >= 0; i--) {
    leaves[i] = leaves[i] || 1;
    if (parent[i] >= 0) leaves[parent[i]] += leaves[i];
  }
  const top = new Array(nodes.length), next = new Array(nodes.length);
  let total = 0;
  nodes.forEach((node, i) => {
    const up = parent[i];
    top[i] = next[i] = up < 0 ? total : next[up];
    if (up < 0) total += leaves[i];
    else next[up] += leaves[i];
  });
  return { start, leaves, top, depth, total };
}
