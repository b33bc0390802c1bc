// What all views share: elements, text, numbers, and the answers about runs.

const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { runs: [], hidden: new Set(), view: "curves", smoothing: 0, search: "", step: null };

/** Returns an element. Texts of runs only ever become text nodes. */
function el(tag, properties = {}, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/;

/** Returns nodes of a model's text: control and direction characters are shown, and parts are marked. */
function shown(text, marks = []) {
  const cuts = [...new Set([0, text.length, ...marks.flat()])].sort((a, b) => a - b);
  const nodes = [];
  for (let i = 0; i + 1 < cuts.length; i++) {
    const pieces = text.slice(cuts[i], cuts[i + 1]).split(new RegExp(`(${CONTROL.source})`)).filter(Boolean)
      .map((piece) => (CONTROL.test(piece) ? el("span", { class: "control" }, `U+${piece.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`) : piece));
    const marked = marks.some(([start, end]) => start <= cuts[i] && cuts[i + 1] <= end);
    nodes.push(...(marked ? [el("mark", {}, pieces)] : pieces));
  }
  return nodes;
}

const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** Returns the ranges of a text that have a part of it, in any case. */
function found(text, part) {
  const ranges = [];
  if (!part) return ranges;
  const lower = text.toLowerCase(), wanted = part.toLowerCase();
  for (let at = lower.indexOf(wanted); at >= 0; at = lower.indexOf(wanted, at + wanted.length)) ranges.push([at, at + wanted.length]);
  return ranges;
}

/** Returns a number with about four digits. */
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e12 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replaceAll("-", "−").replace("e+", "e");
  if (size >= 1e4) {
    const [unit, by] = size >= 1e9 ? ["G", 1e9] : size >= 1e6 ? ["M", 1e6] : ["k", 1e3];
    return `${Number((value / by).toPrecision(4))}${unit}`.replace("-", "−");
  }
  return String(Number(value.toPrecision(4))).replace("-", "−");
}

/** Returns a score with about three digits. */
const score = (value) => (value === null || value === undefined ? "–" : number(Number(value.toPrecision(3))));

const signed = (value) => (value > 0 ? `+${score(value)}` : score(value));

function seconds(value) {
  if (value >= 7200) return `${number(value / 3600)} h`;
  if (value >= 120) return `${number(value / 60)} min`;
  return value >= 1 ? `${Number(value.toPrecision(3))} s` : value >= 1e-3 ? `${Number((value * 1e3).toPrecision(3))} ms` : `${Math.round(value * 1e6)} µs`;
}

const clock = (when) => new Date(when * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
const color = (run) => `var(--run-${run % 8})`;
const visibleRuns = () => state.runs.map((_, run) => run).filter((run) => !state.hidden.has(run));

/** Returns the answer to a question about a run, from the server or from the page itself. */
async function ask(question, query = {}) {
  if (DATA) {
    const fields = Object.keys(query).sort().map((name) => `${name}=${query[name]}`).join("&");
    return DATA.answers[`${question}?${fields}`];
  }
  const response = await fetch(`api/${question}?${new URLSearchParams(query)}`);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

/** Returns a choice of a run; null with one run. */
function runChoice(selected, change) {
  if (state.runs.length < 2) return null;
  const choice = el("select", { "aria-label": "Run", onchange: () => change(Number(choice.value)) },
    state.runs.map((run, i) => el("option", { value: i, selected: i === selected }, run.name)));
  return choice;
}

function segments(label, options, selected, change) {
  return el("div", { class: "segments", role: "group", "aria-label": label },
    options.map(([value, text]) => el("button", { type: "button", "aria-pressed": String(value === selected), onclick: () => change(value) }, text)));
}

/** Returns a list whose items are chosen by pointer or keys, and its `move`. */
function pickList(label, items, draw, pick) {
  const most = 300;
  const list = el("ul", { class: "list panel", role: "listbox", "aria-label": label, tabindex: 0 });
  let at = -1, drawn = 0;
  const grow = () => {
    const next = items.slice(drawn, drawn + most).map((item, i) => {
      const place = drawn + i;
      return el("li", { role: "option", "aria-selected": "false", onclick: () => select(place) }, draw(item));
    });
    drawn += next.length;
    list.append(...next);
  };
  const select = (place, quiet = false) => {
    if (!items.length) return;
    const to = Math.max(0, Math.min(items.length - 1, place));
    while (to >= drawn) grow();
    if (list.children[at]) list.children[at].setAttribute("aria-selected", "false");
    at = to;
    list.children[at].setAttribute("aria-selected", "true");
    if (!quiet) list.children[at].scrollIntoView({ block: "nearest" });
    pick(items[at]);
  };
  list.addEventListener("scroll", () => { if (drawn < items.length && list.scrollTop + list.clientHeight > list.scrollHeight - 200) grow(); });
  grow();
  return { list, select, move: (by) => select(at + by) };
}

function empty(text) { return el("div", { class: "panel empty" }, text); }
