// The runs: state, progress, verdict and findings; and their attempts and the rows that were left out.

const TONE = { finished: "good", profiled: "good", running: "good", preempted: "warn", interrupted: "warn", waiting: "warn" };

function drawRuns() {
  document.getElementById("runs").replaceChildren(el("div", { class: "panel" }, state.runs.map(drawRun)));
  document.title = state.runs.map((run) => run.name).join(", ") + " – MegaRL";
}

function drawRun(run, index) {
  const { progress } = run, pace = progress.pace, hidden = state.hidden.has(index);
  const part = progress.steps ? progress.step / progress.steps : run.state.name === "finished" ? 1 : 0;
  const facts = [
    progress.steps || progress.step ? `step ${progress.step}${progress.steps ? ` of ${progress.steps}` : ""}` : null,
    pace ? `${seconds(pace.seconds_per_step)} a step` : null,
    run.left ? `${run.left} left` : null,
    run.state.name !== "finished" && run.checkpoints.length ? `checkpoint at step ${run.checkpoints.at(-1).step}` : null,
  ];
  const lasting = run.findings.filter((finding) => finding.last === null), past = run.findings.filter((finding) => finding.last !== null);
  return el("div", { class: "run" },
    el("button", { class: "swatch", type: "button", style: { color: color(index) }, "aria-pressed": String(!hidden), title: hidden ? "Show in curves" : "Hide from curves",
      "aria-label": `${run.name} in curves`, onclick: () => { hidden ? state.hidden.delete(index) : state.hidden.add(index); drawRuns(); redraw(); } }),
    el("div", { class: "title" }, el("b", {}, run.name), run.stage ? el("span", { class: "chip" }, run.stage) : null,
      el("span", { class: `chip ${TONE[run.state.name] || "bad"}` }, run.state.name)),
    el("div", { class: "facts number" }, facts.filter(Boolean).join(" · ")),
    el("div", { class: "progress", role: "progressbar", "aria-valuenow": progress.step, "aria-valuemin": 0, "aria-valuemax": progress.steps || progress.step, "aria-label": "Steps" },
      el("i", { style: { width: `${100 * part}%`, color: color(index) } })),
    run.verdict ? el("div", { class: "more" }, verdict(run.verdict)) : null,
    run.state.message ? el("div", { class: "more bad" }, run.state.message) : null,
    run.troubles.filter((text) => text.startsWith("printed")).map((text) => el("div", { class: "more muted" }, text)),
    lasting.length ? el("ul", { class: "more findings" }, lasting.map(drawFinding)) : null,
    past.length ? el("details", { class: "more" }, el("summary", { class: "muted" }, `${past.length} ${past.length === 1 ? "finding" : "findings"} of the health checks that ${past.length === 1 ? "is" : "are"} over`),
      el("ul", { class: "findings" }, past.map(drawFinding))) : null);
}

function verdict(text) {
  const [word] = text.split(":");
  return [el("b", { class: word === "learned" ? "good" : "warn" }, word), text.slice(word.length)];
}

function drawFinding(finding) {
  const when = finding.last === null ? `since step ${finding.first}` : finding.last === finding.first ? `step ${finding.first}` : `steps ${finding.first}–${finding.last}`;
  return el("li", {}, el("b", { class: finding.last !== null ? "muted" : finding.harmful ? "bad" : "warn" }, when), ` ${finding.text}`);
}

const historyView = {
  name: "Attempts",
  async draw(panel) {
    const leftOut = await Promise.all(state.runs.map((_, run) => ask("left_out", { run })));
    panel.replaceChildren(...state.runs.map((run, index) => el("section", {},
      el("h2", {}, state.runs.length > 1 ? `Attempts at ${run.name}` : "Attempts"),
      run.attempts.length ? el("div", { class: "panel scroll" }, el("table", {},
        el("tr", {}, ["", "Started", "Host", "After step", "Ended", "Last step", "Reason"].map((text) => el("th", {}, text))),
        run.attempts.map((attempt) => el("tr", {}, el("td", {}, String(attempt.number)), el("td", {}, clock(attempt.time)),
          el("td", {}, attempt.job ? `${attempt.host} (job ${attempt.job})` : attempt.host), el("td", {}, String(attempt.step)),
          el("td", {}, attempt.end ? clock(attempt.end.time) : "–"), el("td", {}, attempt.end ? String(attempt.end.step) : "–"),
          el("td", {}, attempt.end ? [attempt.end.reason, attempt.end.message ? el("pre", { class: "text" }, shown(attempt.end.message)) : null]
            : attempt === run.attempts[run.attempts.length - 1] ? run.state.name : "killed: it wrote no reason"))))) : empty("No attempt is recorded."),
      el("h2", {}, "Data rows that were left out"),
      leftOut[index].count ? el("div", { class: "panel scroll" }, el("table", {},
        el("tr", {}, ["Field", "Row", "Reason"].map((text) => el("th", {}, text))),
        leftOut[index].rows.map((row) => el("tr", {}, el("td", {}, row.field), el("td", { class: "mono" }, row.where), el("td", {}, row.reason))),
        leftOut[index].count > leftOut[index].rows.length ? el("tr", {}, el("td", { colspan: 3, class: "muted" }, `and ${leftOut[index].count - leftOut[index].rows.length} more in left_out.jsonl`)) : null)) : empty("None."))));
  },
};
