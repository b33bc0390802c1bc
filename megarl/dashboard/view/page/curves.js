// Curves of metrics, several runs in one chart each.

const CHARTS = [
  ["Results", [["Score", "objective/score", "reward"], ["Held-out score", "eval/score", "reward"], ["Score", /^scores\/[^/]+$/, "reward"], ["Held-out", /^eval\/(?!score$|response_length|truncated|.*pass_at)[^/]+$/, ""], ["Loss", /^(sft|dpo|reward_model)\/loss$/, "nats"], ["Held-out loss", "eval/loss", "nats"],
    ["Accuracy", "reward_model/accuracy", ""], ["Accuracy", "dpo/accuracy", ""], ["Margin", "dpo/margin", "reward"], ["Selected score", "select/score", "reward"]]],
  ["Policy", [["KL to the reference", "objective/kl", "nats per response"], ["KL to the reference", "dpo/kl", "nats per response"], ["Entropy", "policy/entropy", "nats per token"], ["Approximate KL", "policy/approxkl", "nats per token"],
    ["Clipped ratios", "policy/clipfrac", "of tokens"], ["Engine difference", "rollout/logprob_gap", "nats per token"], ["Prompts without signal", "group/zero_std_fraction", "of prompts"]]],
  ["Responses", [["Response length", "response_length/mean", "tokens"], ["Truncated", "truncated_fraction", "of responses"], ["Unscored", "rewards/unscored", "responses"]]],
  ["Curriculum", [["Prompts", /^curriculum\/(unknown|hard|medium|easy)$/, "of prompts"], ["Solved before", "curriculum/rate", "of responses"]]],
  ["Losses and gradients", [["Loss", "loss/total", ""], ["Policy loss", "policy/loss", ""], ["Value loss", "value/loss", ""], ["Explained variance", "value/explained_variance", ""],
    ["Gradient norm", /^(policy|value|sft|dpo|reward_model)\/grad_norm$/, ""], ["Learning rate", /^(policy|value|sft|dpo|reward_model)\/lr$/, ""]]],
  ["Speed and memory", [["Step", "time/step", "s"], ["Generation", "time/rollout", "s"], ["Update", "time/update", "s"], ["Throughput", "perf/tokens_per_second", "tokens/s"], ["Engines' throughput", "perf/rollout_tokens_per_second", "tokens/s"],
    ["Memory", /^memory\/(update|rollout)\//, "GiB"]]],
  ["Asynchronous sampling", [["Age of samples", "staleness/mean", "versions"], ["Steps in the queue", "rollout/queue_depth", "steps"]]],
];

function unit(name) {
  if (/^time\/|seconds$/.test(name)) return "s";
  if (name.startsWith("memory/")) return "GiB";
  if (name.includes("tokens_per_second")) return "tokens/s";
  if (/_length\/|^perf\/tokens\//.test(name)) return "tokens";
  if (name.startsWith("staleness/")) return "versions";
  return /fraction|clipfrac|ratio$|idle/.test(name) ? "fraction" : "";
}

const cache = []; // of each run: its generation, and {steps, values} by metric

/** Loads what is new of metrics. */
async function load(names) {
  await Promise.all(state.runs.map(async (run, index) => {
    const own = (cache[index] ||= { generation: run.generation, series: {} });
    if (own.generation !== run.generation) Object.assign(own, { generation: run.generation, series: {} });
    const wanted = names.filter((name) => run.names.includes(name));
    if (DATA) {
      if (!Object.keys(own.series).length) own.series = (await ask("series", { run: index })).series;
      return;
    }
    const batches = new Map();
    for (const name of wanted) {
      const steps = own.series[name]?.steps || [], after = steps.length ? steps[steps.length - 1] : -1;
      if (after < run.last_step) batches.set(after, [...(batches.get(after) || []), name]);
    }
    for (const [after, batch] of batches) {
      const { generation, series } = await ask("series", { run: index, after, names: batch.join(",") });
      if (generation !== own.generation) return;
      for (const [name, points] of Object.entries(series)) {
        const known = (own.series[name] ||= { steps: [], values: [] });
        // Another load may have asked for the same points, and have them here already.
        const last = known.steps.length ? known.steps[known.steps.length - 1] : -1, twice = points.steps.filter((step) => step <= last).length;
        known.steps.push(...points.steps.slice(twice));
        known.values.push(...points.values.slice(twice));
      }
    }
  }));
}

/** Returns the charts: of the search, or those that most people want, in groups. */
function chosenCharts() {
  const known = new Set(state.runs.flatMap((run) => run.names)), names = [...known].filter((name) => !name.endsWith("_ci95")).sort();
  if (state.search.trim()) {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const hits = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    return { groups: [[`${hits.length} of ${names.length} metrics${hits.length > 60 ? ", the first 60" : ""}`, hits.slice(0, 60).map((name) => ({ title: name, name, unit: unit(name) }))]], count: names.length };
  }
  const groups = CHARTS.map(([group, charts]) => [group, charts.flatMap(([title, wanted, of]) =>
    names.filter((name) => (typeof wanted === "string" ? name === wanted : wanted.test(name) && (title !== "Held-out" || known.has(`${name}_ci95`)))).map((name) => ({ title: typeof wanted === "string" || !/\/\w/.test(name) || title === "Loss" ? title : `${title}: ${ending(title, name)}`, name, unit: of })))]);
  // The score of a run's only reward is its score.
  const sources = groups[0][1].filter(({ name }) => name.startsWith("scores/"));
  if (sources.length === 1) groups[0][1] = groups[0][1].filter((chart) => chart !== sources[0]);
  const first = (charts, name) => charts.find((chart) => chart.name === name); // of a function that is called like a metric of ours
  return { groups: groups.map(([group, charts]) => [group, charts.filter((chart) => chart === first(charts, chart.name) && !constant(chart.name))]).filter(([, charts]) => charts.length), count: names.length };
}

const ending = (title, name) => (/^(Gradient|Learning)/.test(title) ? name.split("/")[0] : name.split("/").slice(1).join(", ").replaceAll("_", " "));

/** Whether a metric is 0 throughout, as those of trouble and of staleness may be, which tells nothing. */
function constant(name) {
  return /^staleness|queue|unscored/.test(name) && cache.some((own) => own.series[name]) && cache.every((own) => (own.series[name]?.values || []).every((value) => value === 0));
}

const curvesView = {
  name: "Curves",
  charts: [],
  async draw(panel) {
    const search = el("input", { type: "search", class: "grow", placeholder: "Search all metrics", "aria-label": "Search all metrics", value: state.search,
      oninput: () => { state.search = search.value; this.fill(); } });
    const smooth = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: state.smoothing, "aria-label": "Smoothing",
      oninput: () => { state.smoothing = Number(smooth.value); this.redraw(); } });
    this.body = el("div");
    panel.replaceChildren(el("div", { class: "toolbar" }, search, el("label", {}, "Smoothing", smooth)), this.body);
    await this.fill();
  },
  async fill() {
    const wanted = () => chosenCharts().groups.flatMap(([, charts]) => charts.flatMap(({ name }) => [name, `${name}_ci95`]));
    await load(wanted());
    const { groups } = chosenCharts();
    this.charts = [];
    this.body.replaceChildren(...groups.flatMap(([title, charts]) => [el("h2", {}, title), el("div", { class: "charts" }, charts.map((chart) => {
      const node = el("div", { class: "panel chart" });
      this.charts.push({ ...chart, node });
      return node;
    }))]));
    if (!this.charts.length || !groups.length) this.body.replaceChildren(empty(state.search ? "No metric has this name." : "No step has been taken yet."));
    this.redraw();
  },
  redraw() { this.charts.forEach(drawChart); },
  async update() {
    const names = chosenCharts().groups.flatMap(([, charts]) => charts.map(({ name }) => name));
    if (names.join() !== this.charts.map(({ name }) => name).join()) return this.fill();
    await load(names.flatMap((name) => [name, `${name}_ci95`]));
    return this.redraw();
  },
};

function smoothed(values, weight) {
  if (!weight) return values;
  let mean = 0, scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return mean / scale;
  });
}

/** Returns at most so many points, each the mean of neighbours. */
function thinned(steps, values, most) {
  const size = Math.ceil(steps.length / most);
  if (size <= 1) return { steps, values };
  const out = { steps: [], values: [] };
  for (let i = 0; i < steps.length; i += size) {
    const known = values.slice(i, i + size).filter((value) => value !== null);
    out.steps.push(steps[Math.min(i + (size >> 1), steps.length - 1)]);
    out.values.push(known.length ? known.reduce((a, b) => a + b, 0) / known.length : null);
  }
  return out;
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((by) => by * power).find((size) => size >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

function nearest(steps, step) {
  let best = -1;
  for (let low = 0, high = steps.length - 1; low <= high;) {
    const middle = (low + high) >> 1;
    if (best < 0 || Math.abs(steps[middle] - step) < Math.abs(steps[best] - step)) best = middle;
    if (steps[middle] < step) low = middle + 1; else high = middle - 1;
  }
  return best;
}

const HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

function drawChart(chart) {
  const lines = visibleRuns().flatMap((run) => {
    const points = cache[run]?.series[chart.name];
    return points?.steps.length ? [{ run, points, interval: cache[run].series[`${chart.name}_ci95`] }] : [];
  });
  const width = Math.max(200, chart.node.clientWidth - 26);
  const known = lines.flatMap(({ points, interval }) => points.values.flatMap((value, i) => (value === null ? [] : interval ? [value - (interval.values[i] || 0), value + (interval.values[i] || 0)] : [value])));
  const values = el("div", { class: "values" }), at = el("span");
  const head = [el("div", { class: "head" }, el("h3", {}, chart.title), values),
    el("div", { class: "sub" }, el("span", { title: chart.name }, chart.title === chart.name ? "" : chart.name, chart.unit ? `${chart.title === chart.name ? "" : " · "}${chart.unit}` : ""), at)];
  if (!known.length) {
    chart.node.replaceChildren(...head, el("div", { class: "muted" }, "no value"));
    return;
  }
  let low = known.reduce((a, b) => Math.min(a, b)), high = known.reduce((a, b) => Math.max(a, b));
  const pad = high > low ? 0.06 * (high - low) : Math.abs(high) * 0.1 || 1;
  const floor = low;
  low = floor >= 0 && floor - pad < 0 ? 0 : low - pad;
  high += pad;
  const first = Math.min(...lines.map(({ points }) => points.steps[0])), last = Math.max(...lines.map(({ points }) => points.steps[points.steps.length - 1]));
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const svg = el("svg:svg", { height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, tabindex: 0, role: "img", "aria-label": `${chart.title}, ${lines.map(({ run, points }) => `${state.runs[run].name}: ${number(points.values[points.values.length - 1])}`).join(", ")}` });
  for (const value of ticks(low, high, 4.5)) svg.append(el("svg:line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }), el("svg:text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, number(value)));
  const stepTicks = last > first ? ticks(first, last, Math.min(6, last - first)).filter(Number.isInteger) : [first];
  svg.append(el("svg:text", { x: LEFT - 6, y: HEIGHT - 5, "text-anchor": "end" }, "step"));
  for (const step of stepTicks) svg.append(el("svg:text", { x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, number(step)));
  const limit = state.runs.map((run) => run.limits[chart.name]).find(Boolean), bound = limit && Number(limit.replace(/[<>]/, ""));
  if (limit && bound > low && bound < high) svg.append(el("svg:line", { class: "limit", x1: LEFT, x2: width - RIGHT, y1: y(bound), y2: y(bound) }, el("svg:title", {}, `healthy: ${limit}`)));
  for (const { run, points, interval } of lines) drawLine(svg, { run, points, interval, x, y, width, smoothing: /^eval/.test(chart.name) ? 0 : state.smoothing });
  const cross = el("svg:line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }), dots = lines.map(({ run }) => el("svg:circle", { r: 3.5, fill: color(run), visibility: "hidden" }));
  svg.append(cross, ...dots);
  chart.point = (step) => {
    const shownAt = new Set();
    values.replaceChildren(...lines.map(({ run, points }, i) => {
      const place = step === null ? points.values.length - 1 : nearest(points.steps, step);
      const value = points.values[place];
      dots[i].setAttribute("visibility", step === null || value === null ? "hidden" : "visible");
      if (value !== null) { dots[i].setAttribute("cx", x(points.steps[place])); dots[i].setAttribute("cy", y(value)); }
      shownAt.add(points.steps[place]);
      return el("span", { style: state.runs.length > 1 ? { color: color(run) } : {} }, number(value));
    }));
    at.textContent = step === null ? "" : `step ${[...shownAt].join(", ")}`;
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cross.setAttribute("x1", x(Math.max(first, Math.min(last, step)))); cross.setAttribute("x2", x(Math.max(first, Math.min(last, step)))); }
  };
  const pointAt = (event) => Math.round(first + ((event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width * width - LEFT) / (width - LEFT - RIGHT) * (last - first));
  svg.addEventListener("pointermove", (event) => pointAll(Math.max(first, Math.min(last, pointAt(event)))));
  svg.addEventListener("pointerleave", () => pointAll(null));
  svg.addEventListener("blur", () => pointAll(null));
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    pointAll(Math.max(first, Math.min(last, (state.step ?? (by < 0 ? last + 1 : first - 1)) + by)));
    event.preventDefault();
  });
  chart.node.replaceChildren(...head, svg);
  chart.point(state.step);
}

function pointAll(step) {
  state.step = step;
  curvesView.charts.forEach((chart) => chart.point?.(step));
}

function drawLine(svg, { run, points, interval, x, y, width, smoothing }) {
  const path = (steps, values) => {
    let text = "", open = false;
    values.forEach((value, i) => {
      if (value !== null) text += `${open ? "L" : "M"}${x(steps[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      open = value !== null;
    });
    return text;
  };
  const stroke = color(run);
  if (interval?.steps.length === points.steps.length && points.steps.length > 1 && !points.values.includes(null)) {
    const upper = points.values.map((value, i) => value + (interval.values[i] || 0)), lower = points.values.map((value, i) => value - (interval.values[i] || 0));
    svg.append(el("svg:path", { class: "band", fill: stroke, d: `${path(points.steps, upper)}${path([...points.steps].reverse(), lower.reverse()).replace("M", "L")}Z` }));
  }
  const raw = thinned(points.steps, points.values, width), smooth = thinned(points.steps, smoothed(points.values, smoothing), width);
  if (smoothing) svg.append(el("svg:path", { class: "line raw", stroke, d: path(raw.steps, raw.values) }));
  svg.append(el("svg:path", { class: "line", stroke, d: path(smooth.steps, smooth.values) }));
  if (points.steps.length <= 20) smooth.steps.forEach((step, i) => { if (smooth.values[i] !== null) svg.append(el("svg:circle", { cx: x(step), cy: y(smooth.values[i]), r: 2.4, fill: stroke })); });
}
