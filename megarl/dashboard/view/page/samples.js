// Samples by step and prompt: the responses of a group side by side.

const SORTS = { order: ["Order in the file", () => 0], high: ["Highest score", (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)], low: ["Lowest score", (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity)],
  spread: ["Widest spread of scores", (a, b) => (b.spread ?? -1) - (a.spread ?? -1)], long: ["Longest", (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0)], cut: ["Most cut off", (a, b) => b.cut_off - a.cut_off] };

const kindsOf = (steps) => [["train", "Training"], ["evaluation", "Evaluation"]].filter(([kind]) => steps[kind].length);

const samplesView = {
  name: "Samples",
  run: 0, kind: "train", step: null, partly: "", sort: "order", text: "", everywhere: false, inGroup: "order",
  async draw(panel) {
    this.run = Math.min(this.run, state.runs.length - 1);
    const steps = await ask("steps", { run: this.run }), kinds = kindsOf(steps);
    this.kinds = kinds.length;
    if (!steps[this.kind].length) this.kind = this.kind === "train" ? "evaluation" : "train";
    this.steps = await this.embedded(steps[this.kind]);
    if (!this.steps.length) {
      panel.replaceChildren(el("div", { class: "toolbar" }, runChoice(this.run, (run) => { this.run = run; this.draw(panel); })), empty("This run has no samples to read: its stage generates none, or tracking.samples is 0."));
      return;
    }
    if (!this.steps.includes(this.step)) this.step = this.steps[this.steps.length - 1];
    this.panel = panel;
    const back = el("button", { type: "button", "aria-label": "Step before", onclick: () => this.move(-1) }, "‹"), on = el("button", { type: "button", "aria-label": "Next step", onclick: () => this.move(1) }, "›");
    this.slider = el("input", { type: "range", min: 0, max: this.steps.length - 1, value: this.steps.indexOf(this.step), "aria-label": "Step", oninput: () => this.go(Number(this.slider.value)) });
    this.label = el("b", { class: "number" });
    const sort = el("select", { "aria-label": "Sort prompts", onchange: () => { this.sort = sort.value; this.fill(); } }, Object.entries(SORTS).map(([name, [text]]) => el("option", { value: name, selected: name === this.sort }, text)));
    const inGroup = el("select", { "aria-label": "Sort responses", onchange: () => { this.inGroup = inGroup.value; this.show(); } }, [["order", "Responses as sampled"], ["score", "Best response first"]].map(([name, text]) => el("option", { value: name, selected: name === this.inGroup }, text)));
    let timer = 0;
    this.search = el("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses", class: "grow", value: this.text,
      oninput: () => { clearTimeout(timer); timer = setTimeout(() => { this.text = this.search.value; this.fill(); }, DATA ? 50 : 250); } });
    const everywhere = el("input", { type: "checkbox", checked: this.everywhere, onchange: () => { this.everywhere = everywhere.checked; this.fill(); } });
    this.tones = el("select", { "aria-label": "Colour of tokens", hidden: true, onchange: () => { this.tone = this.tones.value; this.show(); } });
    this.split = el("div", { class: "split" });
    panel.replaceChildren(el("div", { class: "toolbar" }, runChoice(this.run, (run) => { this.run = run; this.step = null; this.draw(panel); }), kinds.length > 1 ? segments("Kind", kinds, this.kind, (kind) => { this.kind = kind; this.step = null; this.draw(panel); }) : null,
      el("div", { class: "stepper" }, back, this.slider, on, this.label), sort, inGroup, this.tones, el("span", { class: "muted" }, this.partly)), el("div", { class: "toolbar" }, this.search, el("label", {}, everywhere, "in all steps")), this.split,
      el("p", { class: "keys" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " prompts, ", el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " steps, ", el("kbd", {}, "n"), " ", el("kbd", {}, "p"), " turns of conversations, ", el("kbd", {}, "/"), " search"));
    await this.fill();
  },
  /** Returns the steps whose samples can be asked for. */
  async embedded(steps) {
    if (!DATA) return steps.map(([step]) => step);
    const there = await Promise.all(steps.map(([step]) => ask("groups", { run: this.run, kind: this.kind, step })));
    const has = there.flatMap((groups) => groups || []).reduce((sum, { samples }) => sum + samples, 0), all = steps.reduce((sum, [, samples]) => sum + samples, 0);
    this.partly = has < all ? `This export has ${has} of ${all} samples.` : "";
    return steps.filter((_, i) => there[i]).map(([step]) => step);
  },
  async find() {
    const query = { run: this.run, kind: this.kind };
    if (!this.text.trim()) return ask("groups", { ...query, step: this.step });
    if (!DATA) return ask("search", { ...query, text: this.text.trim(), ...(this.everywhere ? {} : { step: this.step }) });
    const groups = (await Promise.all((this.everywhere ? this.steps : [this.step]).map((step) => ask("groups", { ...query, step })))).flat();
    const has = await Promise.all(groups.map(async (group) => (await this.samples(group)).some((sample) => found([asText(sample.prompt), asText(sample.response), sample.prompt_id].join("\n"), this.text.trim()).length)));
    return groups.filter((_, i) => has[i]).slice(0, 200);
  },
  samples(group) { return ask("group", { run: this.run, kind: this.kind, step: group.step, prompt: group.prompt_id }); },
  async fill() {
    const turn = (this.turn = (this.turn || 0) + 1), groups = await this.find();
    if (turn !== this.turn) return;
    const several = this.text.trim() && this.everywhere;
    this.label.textContent = `${this.kind === "train" ? "step" : "after step"} ${this.step}`;
    this.slider.setAttribute("aria-valuetext", this.label.textContent);
    const items = [...groups].sort(SORTS[this.sort][1]);
    if (!items.length) {
      this.split.replaceChildren(empty(`Nothing has this text. ${this.partly}`));
      this.pick = null;
      return;
    }
    this.detail = el("div", { "aria-live": "polite" });
    this.pick = pickList("Prompts", items, (group) => [el("div", { class: "name" }, shown(group.title)),
      el("div", { class: "facts number" }, several ? el("span", {}, `step ${group.step}`) : null, el("span", {}, `score ${score(group.score)}`), group.samples > 1 && group.spread !== null ? el("span", {}, `spread ${score(group.spread)}`) : null,
        el("span", {}, `${score(group.tokens)} tokens`), group.cut_off ? el("span", { class: "warn" }, `${group.cut_off} cut off`) : null)], (group) => { this.group = group; this.show(); });
    this.split.replaceChildren(this.pick.list, this.detail);
    const again = this.group ? items.findIndex((group) => group.prompt_id === this.group.prompt_id) : 0;
    this.pick.select(Math.max(0, again), true);
  },
  async show() {
    const group = this.group, samples = await this.samples(group), text = this.text.trim(), responses = withBranches(samples);
    if (group !== this.group || !samples.length) return; // the file may have been read in the middle of a step
    if (this.inGroup === "score") responses.sort(([a], [b]) => (b.score ?? -Infinity) - (a.score ?? -Infinity));
    const scores = samples.map((sample) => sample.score).filter((value) => value !== null), best = Math.max(...scores), worst = Math.min(...scores);
    const tones = tokenTones(samples);
    this.tones.hidden = !tones.length;
    if (!tones.some(([name]) => name === this.tone)) this.tone = "";
    this.tones.replaceChildren(el("option", { value: "" }, "Tokens without colour"), ...tones.map(([name, { title }]) => el("option", { value: name, selected: name === this.tone }, `Tokens by ${title}`)));
    const coloring = this.tone ? tokenColoring(samples, this.tone) : null;
    this.detail.replaceChildren(promptBox(samples[0], text), coloring ? coloring.legend : "", el("div", { class: "responses" }, responses.map((branches) => responseCard(branches, { asked: asText(samples[0].prompt), text, best, worst, coloring }))));
  },
  go(place) { this.step = this.steps[Math.max(0, Math.min(this.steps.length - 1, place))]; this.slider.value = this.steps.indexOf(this.step); this.fill(); },
  move(by) {
    const at = this.steps.findIndex((step) => step >= this.step); // the step itself may have left the file
    this.go((at < 0 ? this.steps.length : at) + by);
  },
  async update() {
    const steps = await ask("steps", { run: this.run });
    if (kindsOf(steps).length !== this.kinds) return redraw();
    const now = steps[this.kind].map(([step]) => step), atEnd = this.step === this.steps[this.steps.length - 1];
    if (now.join() === this.steps.join()) return null;
    this.steps = now;
    this.slider.max = now.length - 1;
    return atEnd && !this.text && document.activeElement === document.body ? this.go(now.length - 1) : null;
  },
  key(key) {
    if (key === "j" || key === "ArrowDown") this.pick?.move(1);
    else if (key === "k" || key === "ArrowUp") this.pick?.move(-1);
    else if (key === "ArrowLeft" || key === "h") this.steps?.length && this.move(-1);
    else if (key === "ArrowRight" || key === "l") this.steps?.length && this.move(1);
    else if (key === "n" || key === "p") moveTurn(key === "n" ? 1 : -1);
    else if (key === "/") this.search?.focus();
    else return false;
    return true;
  },
};

function promptBox(sample, text) {
  const prompt = asText(sample.prompt), fields = Object.entries(sample.fields || {});
  return el("div", { class: "panel box" }, el("div", { class: "label" }, el("span", {}, `Prompt ${sample.prompt_id}`), sample.prompt_tokens ? el("span", {}, `${sample.prompt_tokens} tokens`) : null),
    el("pre", { class: "text" }, shown(prompt, found(prompt, text))),
    fields.length ? el("dl", { class: "fields" }, fields.map(([name, value]) => [el("dt", {}, name), el("dd", {}, shown(asText(value)))])) : null);
}

/**
 * Returns a response, or the branches of a conversation; `best` and `worst` are scores of its group, `asked` is the prompt above it, `label` says when it was given,
 * `reward` whose score is shown, `before` are the branches of an earlier one: what differs is marked.
 */
function responseCard(branches, { asked, text, best, worst, before, label, reward, coloring }) {
  const sample = branches[branches.length - 1], { outcome } = sample;
  const main = reward in (sample.scores || {}) ? sample.scores[reward] : sample.score;
  const response = asText(sample.response), scores = Object.entries(sample.scores || {});
  const tone = sample.score === null ? "bad" : best > worst ? (sample.score === best ? "good" : sample.score === worst ? "warn" : "") : "";
  const versions = [...new Set(branches.flatMap((branch) => branch.versions || []))];
  const written = () => (response ? shown(response, before ? differing(asText(before[0].response), response) : found(response, text || "")) : el("span", { class: "muted" }, "(empty)"));
  return el("article", { class: "panel response" },
    el("div", { class: "top" }, el("span", { class: `score ${tone}` }, main === null ? "unscored" : score(main)), label ? el("span", { class: "muted" }, label) : null,
      sample.advantage === null || sample.advantage === undefined ? null : el("span", { class: `number ${sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "muted"}` }, `advantage ${signed(sample.advantage)}`)),
    outcome?.failure ? el("pre", { class: "text bad" }, shown(outcome.failure)) : null,
    sample.turns ? transcript(branches, { asked, text, before, coloring }) : coloring && sample.tokens ? coloring.draw(sample) : el("pre", { class: "text" }, written()),
    el("div", { class: "facts" }, scores.map(([name, value]) => el("span", {}, `${name} ${score(value)}`)),
      outcome ? el("span", {}, counted(outcome.turns, "turn")) : null,
      sample.response_tokens === undefined ? null : el("span", {}, counted(branches.reduce((sum, branch) => sum + branch.response_tokens, 0), "token")),
      howEnded(sample),
      outcome ? Object.entries(outcome.metrics).map(([name, value]) => el("span", {}, shown(`${name} ${number(value)}`))) : null,
      versions.length ? el("span", { title: "Versions of the weights that generated it" }, `weights ${versions.length > 1 ? `${versions[0]}–${versions[versions.length - 1]}` : versions[0]}`) : null));
}
