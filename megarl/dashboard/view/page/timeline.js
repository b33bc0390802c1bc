// The phases of each process, as bars over time.

const ROW = 22, NAMES = 150, AXIS = 22;

const timelineView = {
  name: "Timeline",
  run: 0, range: null,
  async draw(panel) {
    this.run = Math.min(this.run, state.runs.length - 1);
    this.panel = panel;
    const chooseRun = runChoice(this.run, (run) => { this.run = run; this.range = null; this.draw(panel); });
    const first = await this.ask(null);
    if (!first || !first.rows.length) {
      panel.replaceChildren(el("div", { class: "toolbar" }, chooseRun), empty("This run has no trace."));
      return;
    }
    this.canvas = el("canvas", { tabindex: 0, role: "img", "aria-label": "Phases of each process over time" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.where = el("span", { class: "muted number" });
    this.totals = el("div", { class: "panel scroll" });
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, title: label, onclick: act }, text);
    panel.replaceChildren(el("div", { class: "toolbar" }, chooseRun, button("+", "Zoom in", () => this.zoom(0.5)), button("−", "Zoom out", () => this.zoom(2)), button("‹", "Earlier", () => this.shift(-0.4)), button("›", "Later", () => this.shift(0.4)),
      button("Whole run", "Whole run", () => this.to(null)), button("Last steps", "Last steps", () => this.lastSteps()), this.where), el("div", { class: "panel timeline" }, this.canvas, this.tip),
      el("h2", {}, "Where the time in this range goes"), this.totals, el("p", { class: "keys" }, "Drag over the bars to zoom into a range. ", el("kbd", {}, "+"), " ", el("kbd", {}, "−"), " ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " ", el("kbd", {}, "0")));
    this.listen();
    await this.to(this.range);
  },
  ask(range) {
    if (DATA) return ask("timeline", { run: this.run });
    return ask("timeline", { run: this.run, ...(range ? { start: range[0], end: range[1] } : {}), columns: 1500 });
  },
  async to(range) {
    const turn = (this.turn = (this.turn || 0) + 1), data = await this.ask(range);
    if (turn !== this.turn) return;
    this.data = data;
    const whole = data.whole;
    if (range && (range[1] - range[0] >= whole || range[0] >= range[1])) range = null;
    this.range = range;
    this.shown = range || [0, whole];
    this.paint();
    this.total();
  },
  zoom(by, around = (this.shown[0] + this.shown[1]) / 2) {
    const [start, end] = this.shown, size = Math.max(0.002, (end - start) * by), part = (around - start) / (end - start), from = Math.max(0, around - size * part);
    return this.to([from, Math.min(this.data.whole, from + size)]);
  },
  shift(by) {
    const [start, end] = this.shown, size = end - start, from = Math.max(0, Math.min(this.data.whole - size, start + by * size));
    return this.range ? this.to([from, from + size]) : null;
  },
  lastSteps() {
    const steps = this.data.rows.filter((row) => row.name === "step").flatMap((row) => row.spans), whole = this.data.whole;
    const run = state.runs[this.run], each = run.progress.pace?.seconds_per_step || 1, end = steps.length ? Math.max(...steps.map((span) => span[1])) : whole;
    return this.to([Math.max(0, end - 3 * each), Math.min(whole, end)]);
  },
  label(row) { return new Set(this.data.rows.map(({ attempt }) => attempt)).size > 1 ? `${row.attempt}: ${row.name}` : row.name; },
  color(name) {
    if (name === "wait") return "wait";
    const part = name.replace(/^step \d+$/, "step");
    this.colors ||= new Map();
    if (!this.colors.has(part)) this.colors.set(part, this.colors.size);
    const hue = (this.colors.get(part) * 137.5 + 215) % 360;
    return matchMedia("(prefers-color-scheme: dark)").matches ? `hsl(${hue} 45% 52%)` : `hsl(${hue} 55% 62%)`;
  },
  paint() {
    const style = getComputedStyle(document.body), css = (name) => style.getPropertyValue(name).trim(), ratio = devicePixelRatio || 1, { rows } = this.data;
    const names = this.names = this.canvas.clientWidth < 560 ? 84 : NAMES, width = this.canvas.clientWidth, height = AXIS + rows.length * (ROW + 6), [start, end] = this.shown;
    Object.assign(this.canvas, { width: width * ratio, height: height * ratio });
    this.canvas.style.height = `${height}px`;
    const draw = this.canvas.getContext("2d");
    draw.scale(ratio, ratio);
    draw.clearRect(0, 0, width, height);
    draw.font = "11px system-ui, sans-serif";
    draw.textBaseline = "middle";
    const x = (this.x = (time) => names + ((time - start) / (end - start)) * (width - names));
    for (const time of ticks(start, end, Math.max(2, Math.floor(width / 130)))) {
      draw.fillStyle = css("--line");
      draw.fillRect(x(time), AXIS - 4, 1, height);
      draw.fillStyle = css("--muted");
      draw.fillText(axisTime(time, end - start), Math.min(x(time) + 4, width - 44), 8);
    }
    rows.forEach((row, i) => {
      const top = AXIS + i * (ROW + 6);
      draw.fillStyle = css("--ink");
      draw.fillText(clipped(draw, this.label(row), names - 10), 0, top + ROW / 2);
      draw.save();
      draw.beginPath();
      draw.rect(names, top, width - names, ROW);
      draw.clip();
      for (const [from, to, name] of row.spans) {
        if (to < start || from > end) continue;
        const left = Math.max(names, x(from)), right = Math.min(width, x(to)), size = Math.max(0.8, right - left - (right - left > 4 ? 1 : 0)), tone = this.color(name);
        draw.fillStyle = tone === "wait" ? css("--soft") : tone;
        draw.fillRect(left, top, size, ROW);
        if (size > 34) {
          draw.fillStyle = tone === "wait" ? css("--muted") : "#10151c";
          draw.fillText(clipped(draw, name, size - 8), left + 4, top + ROW / 2);
        }
      }
      draw.restore();
    });
    if (this.drag) {
      draw.fillStyle = css("--accent");
      draw.globalAlpha = 0.2;
      draw.fillRect(Math.min(...this.drag), AXIS, Math.abs(this.drag[1] - this.drag[0]), height);
      draw.globalAlpha = 1;
    }
    this.where.textContent = `${axisTime(start, end - start)} to ${axisTime(end, end - start)} of ${axisTime(this.data.whole, this.data.whole)}`;
  },
  total() {
    const [start, end] = this.shown;
    this.totals.replaceChildren(el("table", {}, el("tr", {}, el("th", {}, "Process"), el("th", { class: "number" }, "Busy"), el("th", {}, "Longest phases")), this.data.rows.filter((row) => row.name !== "step").map((row) => {
      const inRange = DATA && this.range ? totalsOf(row.spans, start, end) : row.seconds, size = end - start, busy = inRange.filter(([name]) => name !== "wait").reduce((sum, [, took]) => sum + took, 0);
      return el("tr", {}, el("td", {}, this.label(row)), el("td", { class: "number" }, `${Math.min(100, Math.round((100 * busy) / size))}%`), el("td", { class: "muted" }, inRange.filter(([name]) => name !== "wait").slice(0, 5).map(([name, took]) => `${name} ${seconds(took)}`).join(", ") || "–"));
    })));
  },
  listen() {
    const { canvas } = this, time = (at) => this.shown[0] + ((at - this.names) / (canvas.clientWidth - this.names)) * (this.shown[1] - this.shown[0]), inside = (event) => event.clientX - canvas.getBoundingClientRect().left;
    canvas.addEventListener("pointerdown", (event) => { if (inside(event) > this.names) { this.drag = [inside(event), inside(event)]; canvas.setPointerCapture(event.pointerId); } });
    canvas.addEventListener("pointermove", (event) => {
      if (this.drag) { this.drag[1] = Math.max(this.names, inside(event)); this.paint(); }
      this.hover(event, time(inside(event)));
    });
    canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 5) this.to([Math.max(0, time(Math.min(...drag))), Math.min(this.data.whole, time(Math.max(...drag)))]); else this.paint();
    });
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.paint(); });
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.4 : 0.7, time(inside(event)));
    }, { passive: false });
  },
  hover(event, time) {
    const row = this.data.rows[Math.floor((event.clientY - this.canvas.getBoundingClientRect().top - AXIS) / (ROW + 6))], span = row?.spans.find(([from, to]) => from <= time && time <= to);
    this.tip.hidden = !span;
    if (!span) return;
    this.tip.textContent = `${span[2]} · ${seconds(span[1] - span[0])} · from ${axisTime(span[0], span[1] - span[0])}`;
    this.tip.style.left = `${Math.min(event.clientX + 12, innerWidth - this.tip.offsetWidth - 8)}px`;
    this.tip.style.top = `${event.clientY + 16}px`;
  },
  redraw() { if (this.data && this.canvas?.isConnected) this.paint(); },
  update() { return !this.canvas?.isConnected ? this.draw(this.panel) : this.range ? null : this.to(null); },
  key(key) {
    if (!this.data) return false;
    if (key === "+" || key === "=") this.zoom(0.5);
    else if (key === "-") this.zoom(2);
    else if (key === "ArrowLeft") this.shift(-0.4);
    else if (key === "ArrowRight") this.shift(0.4);
    else if (key === "0") this.to(null);
    else return false;
    return true;
  },
};

const axisTime = (time, range) => (range > 600 && time >= 120 ? `${number(time / 60)} min` : `${Number(time.toFixed(range < 0.1 ? 4 : range < 10 ? 2 : 1))} s`);

function clipped(draw, text, width) {
  if (draw.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && draw.measureText(`${text.slice(0, end)}…`).width > width) end--;
  return end > 2 ? `${text.slice(0, end)}…` : "";
}

function totalsOf(spans, start, end) {
  const sums = new Map();
  for (const [from, to, name] of spans) if (to > start && from < end) sums.set(name, (sums.get(name) || 0) + Math.min(to, end) - Math.max(from, start));
  return [...sums].sort((a, b) => b[1] - a[1]);
}
