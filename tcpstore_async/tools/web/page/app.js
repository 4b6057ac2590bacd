// The page: asks for /api/state and shows it.
//
// Texts come from peers of the store. They reach the document as text nodes only: never as markup, attributes or URLs.
"use strict";

const EVERY = 1000; // milliseconds between requests
const SLOWEST = 15000; // when nobody answers
const PATIENCE = 10000;
const LOOKING = 90000; // looking at processes takes seconds
const LARGEST_CELL = 22;
const NARROWEST_MARK = 5; // pixels: a missing rank is found among a hundred thousand
const ORDER = ["j", "w", "l", "m", "g", "n"];
const MARKED = { l: true, m: true };

const byId = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");

// The plural ending for ranks such as "3, 5–7".
const plural = (ranks) => (/^\d+$/.test(ranks) ? "" : "s");

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

function paragraph(...parts) {
  const made = element("p");
  for (const part of parts) made.append(part);
  return made;
}

// Texts may contain what reverses the direction of the text around them.
function name(text) {
  const made = element("code", text);
  made.dir = "ltr";
  return made;
}

function seconds(number) {
  if (number < 100) return `${number.toFixed(1)} s`;
  return number < 6000 ? `${Math.round(number / 60)} min` : `${(number / 3600).toFixed(1)} h`;
}

function milliseconds(number) {
  return number < 1 ? `${Number((1000 * number).toPrecision(2))} ms` : `${number} s`;
}

function wallClock() {
  const two = "2-digit"; // all of them: else an hour after midnight has one digit
  const parts = { year: "numeric", month: two, day: two, hour: two, minute: two, second: two, timeZoneName: "short" };
  return new Date().toLocaleString("sv-SE", parts);
}

function clock(date) {
  return date.toLocaleTimeString("en-GB");
}

// A duration up to the look, with the time of day at which it began: that is what other logs have.
function since(number) {
  return `${seconds(number)} (since ${clock(new Date(Date.now() - 1000 * (number + (last.age || 0))))})`;
}

function ago(number) {
  return `${seconds(number)} ago, at ${clock(new Date(Date.now() - 1000 * (number + (last.age || 0))))}`;
}

function size(bytes) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(1)} ${name}`;
  }
  return `${bytes} B`;
}

// "j120w3" -> one character for each rank
function decode(runs) {
  let text = "";
  for (const [, state, length] of runs.matchAll(/([a-z])(\d+)/g)) text += state.repeat(Number(length));
  return text;
}

// The grid

const grid = { states: "", columns: 1, cell: 1, drawn: "" };

function colours() {
  const style = getComputedStyle(document.documentElement);
  const found = {};
  for (const state of [...ORDER, "mark", "line", "text", "quiet"]) found[state] = style.getPropertyValue(`--${state}`).trim();
  return found;
}

function prepare(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

function fitting(ranks, width) {
  const height = Math.max(240, Math.min(640, window.innerHeight * 0.7));
  let cell = LARGEST_CELL;
  while (cell > 2 && Math.ceil(ranks / Math.floor(width / cell)) * cell > height) cell -= 1;
  return cell;
}

// Missing ranks have a cross, late ones a bar: they are known without colours, too.
function mark(context, state, x, y, edge, colour) {
  context.strokeStyle = colour;
  context.lineWidth = Math.max(1, edge / 7);
  context.beginPath();
  context.moveTo(x + edge * 0.22, y + edge * 0.22);
  context.lineTo(x + edge * 0.78, y + edge * 0.78);
  if (state === "m") {
    context.moveTo(x + edge * 0.78, y + edge * 0.22);
    context.lineTo(x + edge * 0.22, y + edge * 0.78);
  }
  context.stroke();
}

function drawGrid(states) {
  const canvas = byId("grid");
  const width = Math.max(200, Math.floor(canvas.parentElement.clientWidth - 24));
  const colour = colours();
  const identity = `${width} ${window.devicePixelRatio} ${window.innerHeight} ${colour.j} ${states}`;
  if (identity === grid.drawn) return;
  grid.drawn = identity;
  const cell = fitting(states.length, width);
  const columns = Math.max(1, Math.floor(width / cell));
  const rows = Math.ceil(states.length / columns);
  Object.assign(grid, { states, columns, cell });
  canvas.hidden = states.length === 0;
  const context = prepare(canvas, columns * cell, Math.max(1, rows * cell));
  const gap = cell >= 5 ? 1 : 0;
  const marked = [];
  for (let row = 0; row < rows; row++) {
    const end = Math.min(states.length, (row + 1) * columns);
    for (let at = row * columns; at < end; ) {
      const state = states[at];
      const from = at;
      for (at += 1; at < end && states[at] === state && !gap; at++);
      context.fillStyle = colour[state];
      context.fillRect((from - row * columns) * cell, row * cell, (at - from) * cell - gap, cell - gap);
      if (MARKED[state]) for (let one = from; one < at; one++) marked.push(one);
    }
  }
  const edge = Math.max(NARROWEST_MARK, cell - gap);
  for (const at of marked) {
    const x = Math.min((at % columns) * cell, columns * cell - edge);
    const y = Math.max(0, Math.min(Math.floor(at / columns) * cell, rows * cell - edge));
    if (edge > cell) {
      context.fillStyle = colour[states[at]];
      context.fillRect(x, y, edge, edge);
    } else if (cell >= 8) {
      mark(context, states[at], x, y, edge, colour.mark);
    }
  }
}

function drawLegend(states, counts) {
  const colour = colours();
  const list = byId("legend");
  list.replaceChildren();
  for (const state of ORDER) {
    if (!counts[state] && "lgn".includes(state)) continue;
    const item = element("li");
    const sample = element("canvas");
    sample.width = sample.height = 32;
    const context = sample.getContext("2d");
    context.fillStyle = colour[state];
    context.fillRect(0, 0, 32, 32);
    if (MARKED[state]) mark(context, state, 0, 0, 32, colour.mark);
    const number = element("b", count(counts[state]));
    number.dataset.state = state;
    item.append(sample, number, ` ${states[state]}`);
    list.append(item);
  }
}

// One rank

let asked = 0;

async function showRank(number) {
  const state = grid.states[number];
  const output = byId("detail");
  if (state === undefined) {
    output.textContent = "There is no such rank.";
    return;
  }
  const mine = ++asked;
  const said = `rank ${number}: ${last.states[state]}`;
  output.textContent = said;
  try {
    const { detail } = await get(`/api/rank${query({ number })}`);
    if (mine !== asked || !detail) return;
    const where = detail.pid === null ? `${detail.host}:${detail.port}` : `${detail.host}, pid ${detail.pid}`;
    output.textContent = `${said}; ${where}; ${detail.does} (last request ${ago(detail.since)})`;
  } catch {
    // the next answer says what is wrong
  }
}

function rankAt(event) {
  const box = byId("grid").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / grid.cell);
  const row = Math.floor((event.clientY - box.top) / grid.cell);
  if (column < 0 || column >= grid.columns || row < 0) return -1;
  return row * grid.columns + column;
}

function pointed(event) {
  const number = rankAt(event);
  if (number < 0 || number >= grid.states.length || String(number) === byId("number").value) return;
  byId("number").value = String(number);
  showRank(number);
}

// Stores with names

const chosen = { store: new URLSearchParams(location.search).get("store") || "" };

// The part of an address that says which store is asked for.
function query(more) {
  const said = new URLSearchParams(more);
  if (chosen.store) said.set("store", chosen.store);
  return String(said) ? `?${said}` : "";
}

function choose(store) {
  chosen.store = store;
  history.replaceState(null, "", location.pathname + query({}));
  byId("store").value = store;
  byId("detail").textContent = "";
  for (const id of ["pending", "waits", "legend", "stacks", "looked"]) byId(id).replaceChildren();
  drawGrid("");
  byId("unnamed").textContent = "";
  drawStores(last);
  status("loading …", false);
  follow();
}

function drawStores(state) {
  const stores = state.stores || [];
  const rows = new Map([["", ""], ...stores.map((one) => [one.name, facts(one)])]);
  if (!rows.has(chosen.store)) rows.set(chosen.store, "");
  byId("stores").hidden = rows.size === 1;
  const list = byId("store-list");
  const drawn = JSON.stringify([...rows.keys(), chosen.store]);
  if (list.dataset.drawn !== drawn) { // else a button that is being pressed stays the same one
    list.dataset.drawn = drawn;
    list.replaceChildren(...[...rows.keys()].map(storeItem));
  }
  [...rows.values()].forEach((text, at) => (list.children[at].querySelector("span").textContent = text));
  byId("more-stores").textContent = state.more_stores ? `and ${count(state.more_stores)} more: type a name` : "";
}

function storeItem(store) {
  const button = element("button");
  button.type = "button";
  button.append(store ? name(store) : "the unnamed store", " ", element("span"));
  button.setAttribute("aria-pressed", String(store === chosen.store));
  button.addEventListener("click", () => choose(store));
  const item = element("li");
  item.append(button);
  return item;
}

function facts(one) {
  const joined = one.expected === null ? count(one.joined) : `${count(one.joined)} of ${count(one.expected)}`;
  return `${joined} joined, ${count(one.sessions)} connected, ${count(one.keys)} keys, ${size(one.bytes)}, owner ${one.owner}`;
}

// Lists

function drawPending(look) {
  const folder = byId("pending");
  folder.replaceChildren();
  if (!look.pending.length) {
    folder.append(paragraph("No rank is missing from any pending wait. Collectives do not pass through the store: look at the processes."));
    return;
  }
  for (const one of look.pending) {
    const item = element("div", undefined, "item missing");
    const title = element("h3", { join: "Joining", barrier: "Barrier ", keys: "Keys " }[one.kind]);
    if (one.kind !== "join") title.append(name(one.key));
    const expected = one.expected === null ? "an unknown number" : count(one.expected);
    title.append(`: ${count(one.arrived)} of ${expected} have arrived`);
    item.append(title);
    if (one.missing) item.append(paragraph(element("b", "missing: "), `rank${plural(one.missing)} ${one.missing}`));
    if (one.waiting) item.append(paragraph(`${count(one.waiting)} waiting, the longest for ${since(one.since)}`));
    for (const rank of one.elsewhere) {
      const place = rank.pid === null ? `${rank.host}:${rank.port}` : `${rank.host}:${rank.port}, pid ${rank.pid}`;
      const who = rank.rank === null ? place : `rank ${rank.rank} (${place})`;
      item.append(paragraph(`${who} is connected but `, name(rank.does), ` (last request ${ago(rank.since)})`));
    }
    if (one.more_elsewhere) item.append(paragraph(`and ${count(one.more_elsewhere)} more connected`));
    if (one.unseen) item.append(paragraph(`${count(one.unseen)} not connected`));
    if (one.unidentified) {
      const whose = one.unidentified === 1 ? "its connection is" : "their connections are";
      item.append(paragraph(`${count(one.unidentified)} may be connected, but ${whose} not known`));
    }
    for (const [host, arrived, usual] of one.fewer_on) {
      item.append(paragraph("from ", name(host), `: ${count(arrived)} (${count(usual)} from most hosts)`));
    }
    folder.append(item);
  }
  if (look.more_pending) folder.append(paragraph(`and ${count(look.more_pending)} more`));
}

function drawWaits(look) {
  const folder = byId("waits");
  folder.replaceChildren();
  if (!look.waits.length) folder.append(paragraph("No rank is waiting for a key."));
  for (const one of look.waits) {
    const item = element("div", undefined, "item");
    const title = element("h3");
    title.append(name(one.key));
    item.append(title);
    const who = one.ranks ? ` (rank${plural(one.ranks)} ${one.ranks})` : "";
    const rest = one.connections.length ? ` (${one.connections.join("; ")})` : "";
    const longest = one.waiting === 1 ? "waiting" : "waiting, the longest";
    item.append(paragraph(`${count(one.waiting)} ${longest} for ${since(one.since)}${who}${rest}`));
    for (const near of one.nearest) {
      const age = near.age === null ? "" : `, written ${ago(near.age)}`;
      const by = near.by === null ? "" : ` by ${near.by}`;
      const line = paragraph(name(near.key), ` exists${age}${by}`);
      line.className = "near";
      item.append(line);
    }
    if (one.more) item.append(paragraph(`and for ${count(one.more)} more keys`));
    folder.append(item);
  }
  if (look.more_waits) folder.append(paragraph(`and ${count(look.more_waits)} more keys`));
}

function drawOps(state) {
  const canvas = byId("ops");
  const rates = state.ops;
  const width = Math.max(200, Math.floor(canvas.parentElement.clientWidth - 24));
  const height = 112;
  const context = prepare(canvas, width, height);
  const colour = colours();
  const most = Math.max(1, ...rates);
  const span = Math.max(60, rates.length);
  const now = rates.length ? rates[rates.length - 1] : 0;
  byId("rate").textContent = rates.length
    ? `${count(now)} per second now; at most ${count(Math.max(...rates))} in the last ${seconds(rates.length)}`
    : "Not known yet.";
  const base = height - 16;
  context.fillStyle = colour.j;
  for (let at = 0; at < rates.length; at++) {
    const right = width - ((rates.length - 1 - at) * width) / span;
    const tall = (rates[at] / most) * (base - 4);
    context.fillRect(right - width / span, base - tall, Math.max(1, width / span), tall);
  }
  context.fillStyle = colour.line;
  context.fillRect(0, base, width, 1);
  context.fillStyle = colour.quiet;
  context.font = "12px sans-serif";
  context.fillText(`${seconds(span)} ago`, 0, height - 3);
  context.textAlign = "right";
  context.fillText("now", width, height - 3);
  const list = byId("commands");
  list.replaceChildren();
  for (const [command, rate] of state.commands) list.append(element("li", `${command} ${count(rate)}/s`));
}

function drawFigures(state) {
  const look = state.look;
  const server = state.server;
  const rows = [];
  if (look) {
    const total = look.world_size === null ? "" : ` / ${count(look.world_size)}`;
    rows.push(["joined", count(look.joined) + total]);
    rows.push(["missing", count(look.counts.m + look.counts.l)]);
  }
  const figures = state.figures;
  if (figures.keys !== undefined) {
    rows.push(["waiting", count(figures.waiting)], ["connections", count(figures.connections)]);
    rows.push(["keys", count(figures.keys)], ["memory", size(figures.resident_bytes)]);
    rows.push(["loop lag", `≤ ${milliseconds(figures.lag)}`], ["accept queue", count(figures.accept_queue)]);
  }
  const list = byId("figures");
  list.replaceChildren();
  for (const [title, value] of rows) {
    const box = element("div");
    const number = element("dd", value);
    number.dataset.figure = title;
    box.append(element("dt", title), number);
    list.append(box);
  }
  if (server.port) {
    const where = server.host.includes(":") ? `[${server.host}]:${server.port}` : `${server.host}:${server.port}`;
    byId("where").textContent = `${where} on ${server.hostname}`;
    document.title = `tcpstore ${where} on ${server.hostname}`;
    byId("about").textContent = ` · tcpstore_async ${server.version} (${server.build}), pid ${server.pid}`;
  }
}

// Following

let last = { states: {} };
let pause = EVERY;
let unanswered = null;
let timer = 0;

async function get(path, patience = PATIENCE) {
  const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(patience) });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response.json();
}

function status(text, bad) {
  const line = byId("status");
  if (line.textContent !== text) line.textContent = text;
  line.className = bad ? "bad" : "";
}

function show(state) {
  last = state;
  byId("now").textContent = wallClock();
  drawStores(state);
  drawFigures(state);
  drawOps(state);
  const look = state.look;
  if (look) {
    drawGrid(decode(look.ranks));
    drawLegend(state.states, look.counts);
    const others = decode(look.unnamed);
    const waiting = others.length - (others.indexOf("w") < 0 ? others.length : others.indexOf("w"));
    byId("unnamed").textContent = others.length
      ? `and ${count(others.length)} connected processes whose rank is not known, ${count(waiting)} of them waiting`
      : "";
    drawPending(look);
    drawWaits(look);
  }
  if (state.silent) {
    const since = clock(new Date(Date.now() - 1000 * state.silent));
    status(`the server has not answered since ${since}${state.error ? `: ${state.error}` : ""}`, true);
  } else if (state.failed) {
    status(`cannot inspect the server: ${state.failed}`, true);
  } else if (state.server.why_held) {
    status(state.server.why_held, true);
  } else if (!look) {
    status("loading …", false);
  } else {
    status(state.age < 3 ? "live" : `as of ${seconds(state.age)} ago`, false);
  }
  document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
}

async function follow() {
  clearTimeout(timer);
  const store = chosen.store;
  try {
    const state = await get(`/api/state${query({})}`);
    if (store !== chosen.store) return; // another one has been chosen, and is asked for
    show(state);
    unanswered = null;
    pause = EVERY;
  } catch (error) {
    if (store !== chosen.store) return;
    unanswered = unanswered || new Date();
    status(`the process that serves this page has not answered since ${clock(unanswered)} (${error.message})`, true);
    pause = Math.min(SLOWEST, 2 * pause);
  }
  if (!document.hidden) timer = setTimeout(follow, pause);
}

// What the processes do: asked for, as the hosts of all ranks have to look

async function lookAtProcesses() {
  byId("look").disabled = true;
  byId("looked").textContent = "looking …";
  try {
    const { lines } = await get(`/api/stacks${query({})}`, LOOKING);
    byId("stacks").textContent = lines.join("\n");
    byId("looked").textContent = `as of ${clock(new Date())}`;
  } catch (error) {
    byId("looked").textContent = error.message;
  }
  byId("look").disabled = false;
}

// The state as text, for a ticket

function asText() {
  const figures = [...byId("figures").children].map((box) => `${box.children[0].textContent} ${box.children[1].textContent}`);
  const parts = [`${document.title}, ${wallClock()}: ${byId("status").textContent}`, figures.join(", ")];
  for (const id of ["legend", "pending", "stacks", "waits"]) {
    const text = byId(id).innerText.trim().replace(/\n+/g, "\n");
    if (text) parts.push(`${byId(id).closest("section").querySelector("h2").textContent}\n${text}`);
  }
  return parts.join("\n\n");
}

async function copyState() {
  const text = asText();
  try {
    await navigator.clipboard.writeText(text);
  } catch { // browsers have no clipboard for pages without TLS from other hosts
    const area = element("textarea", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  byId("copy").textContent = "Copied";
  setTimeout(() => (byId("copy").textContent = "Copy as text"), 2 * EVERY);
}

function redraw() {
  if (last.look) show(last);
}

byId("grid").addEventListener("pointermove", pointed);
byId("grid").addEventListener("pointerdown", pointed);
byId("number").addEventListener("input", (event) => showRank(Number(event.target.value)));
byId("find").addEventListener("submit", (event) => event.preventDefault());
byId("choose").addEventListener("submit", (event) => {
  event.preventDefault();
  choose(byId("store").value);
});
byId("look").addEventListener("click", lookAtProcesses);
byId("copy").addEventListener("click", copyState);
byId("store").value = chosen.store;
window.addEventListener("resize", redraw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) follow(); });
follow();
