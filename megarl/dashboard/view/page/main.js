// The page: its views, keys, and what it asks again while a run trains.

const VIEWS = { curves: curvesView, samples: samplesView, heldout: heldOutView, timeline: timelineView, settings: settingsView, attempts: historyView };
const EVERY_MS = 2000;
const panel = document.getElementById("view"), tabs = document.getElementById("tabs"), live = document.getElementById("live");

function drawTabs() {
  tabs.replaceChildren(...Object.entries(VIEWS).map(([name, view]) => el("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(name === state.view), "aria-controls": "view", onclick: () => { location.hash = name; } }, view.name)));
  panel.setAttribute("aria-labelledby", `tab-${state.view}`);
  document.getElementById(`tab-${state.view}`).scrollIntoView({ block: "nearest" });
}

async function open() {
  const wanted = location.hash.slice(1);
  state.view = Object.hasOwn(VIEWS, wanted) ? wanted : "curves";
  drawTabs();
  await VIEWS[state.view].draw(panel);
}

function redraw() {
  const view = VIEWS[state.view];
  return view.redraw ? view.redraw() : view.draw(panel);
}

async function follow() {
  try {
    if (document.hidden) return;
    const before = state.runs.map(sign);
    state.runs = await Promise.all(state.runs.map((_, run) => ask("overview", { run })));
    live.className = state.runs.some((run) => run.state.name === "running") ? "on" : "";
    live.textContent = live.className ? "live" : "";
    if (state.runs.some((run, i) => sign(run) !== before[i])) {
      drawRuns();
      await VIEWS[state.view].update?.();
    }
  } catch (error) {
    live.className = "off";
    live.textContent = error instanceof TypeError ? "megarl view has ended" : String(error.message);
  } finally {
    setTimeout(follow, EVERY_MS);
  }
}

const sign = (run) => JSON.stringify([run.state, run.last_step, run.left, run.written, run.findings.length, run.generation]);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape" && event.target instanceof HTMLInputElement) event.target.blur();
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || event.target.tagName === "svg") return;
  const place = Number(event.key) - 1, names = Object.keys(VIEWS);
  if (event.target.getAttribute?.("role") === "tab" && /^Arrow(Left|Right)$/.test(event.key)) {
    location.hash = names[(names.indexOf(state.view) + (event.key === "ArrowRight" ? 1 : names.length - 1)) % names.length];
    setTimeout(() => document.getElementById(`tab-${state.view}`).focus(), 50);
  } else if (place >= 0 && place < names.length) location.hash = names[place];
  else if (!VIEWS[state.view].key?.(event.key)) return;
  event.preventDefault();
});

let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; VIEWS[state.view].redraw?.(); } });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => VIEWS[state.view].redraw?.());
addEventListener("hashchange", open);

(async () => {
  const count = DATA ? DATA.runs : await ask("runs");
  state.runs = await Promise.all([...Array(count).keys()].map((run) => ask("overview", { run })));
  drawRuns();
  await open();
  if (DATA) live.textContent = `as of ${clock(state.runs[0].now)}`;
  else follow();
})().catch((error) => document.getElementById("runs").replaceChildren(empty(`The page cannot be shown: ${error.message}`)));
