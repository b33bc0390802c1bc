// How the answers to a held-out prompt change over the run.

const change = (prompt, reward) => {
  const scores = prompt.scores[reward] || [];
  return scores.length ? scores[scores.length - 1][1] - scores[0][1] : 0;
};

const heldOutView = {
  name: "Held-out prompts",
  run: 0, sort: "order", reward: null,
  async draw(panel) {
    this.run = Math.min(this.run, state.runs.length - 1);
    this.panel = panel;
    const prompts = await ask("prompts", { run: this.run }), chooseRun = runChoice(this.run, (run) => { this.run = run; this.draw(panel); });
    this.known = prompts.reduce((sum, prompt) => sum + prompt.steps.length, 0);
    if (!prompts.length) {
      panel.replaceChildren(el("div", { class: "toolbar" }, chooseRun), empty("There are no answers to held-out prompts: the run has no evaluation that generates, or tracking.samples is 0."));
      return;
    }
    const rewards = [...new Set(prompts.flatMap((prompt) => Object.keys(prompt.scores)))];
    if (!rewards.includes(this.reward)) this.reward = rewards.find((name) => name !== "reward_model") || rewards[0];
    const reward = el("select", { "aria-label": "Reward", onchange: () => { this.reward = reward.value; this.draw(panel); } }, rewards.map((name) => el("option", { value: name, selected: name === this.reward }, name)));
    const sort = el("select", { "aria-label": "Sort", onchange: () => { this.sort = sort.value; this.draw(panel); } }, [["order", "Order in the file"], ["better", "Most improved"], ["worse", "Most worsened"]].map(([name, text]) => el("option", { value: name, selected: name === this.sort }, text)));
    const order = { order: () => 0, better: (a, b) => change(b, this.reward) - change(a, this.reward), worse: (a, b) => change(a, this.reward) - change(b, this.reward) }[this.sort];
    const detail = el("div", { "aria-live": "polite" });
    this.pick = pickList("Held-out prompts", [...prompts].sort(order), (prompt) => {
      const scores = prompt.scores[this.reward] || [], by = change(prompt, this.reward);
      return [el("div", { class: "name" }, shown(prompt.title)), el("div", { class: "facts number" }, scores.length ? el("span", {}, `${score(scores[0][1])} → ${score(scores[scores.length - 1][1])}`) : null,
        by ? el("span", { class: by > 0 ? "good" : "bad" }, signed(by)) : null)];
    }, (prompt) => { this.prompt = prompt; this.show(prompt, detail); });
    const better = prompts.filter((prompt) => change(prompt, this.reward) > 0).length, worse = prompts.filter((prompt) => change(prompt, this.reward) < 0).length;
    panel.replaceChildren(el("div", { class: "toolbar" }, chooseRun, rewards.length > 1 ? reward : null, sort, el("span", { class: "muted" }, `${prompts.length} prompts with answers: ${better} better, ${worse} worse than at first`)), el("div", { class: "split" }, this.pick.list, detail),
      el("p", { class: "keys" }, el("kbd", {}, "j"), " ", el("kbd", {}, "k"), " prompts, ", el("kbd", {}, "n"), " ", el("kbd", {}, "p"), " turns of conversations. Marked: what differs from the answer before."));
    const again = this.prompt ? [...prompts].sort(order).findIndex(({ prompt_id }) => prompt_id === this.prompt.prompt_id) : 0;
    this.pick.select(Math.max(0, again), true);
  },
  async show(prompt, detail) {
    const answers = await Promise.all(prompt.steps.map((step) => ask("group", { run: this.run, kind: "evaluation", step, prompt: prompt.prompt_id })));
    if (prompt !== this.prompt) return;
    const there = prompt.steps.map((step, i) => ({ step, samples: withBranches(answers[i] || []) })).filter(({ samples }) => samples.length);
    if (!there.length) {
      detail.replaceChildren(empty("The answers are not in this export."));
      return;
    }
    const when = (step) => (step ? `after step ${step}` : "before training"), single = there.every(({ samples }) => samples.length === 1);
    const [first] = there[0].samples[0];
    const cards = there.map(({ step, samples }, i) => samples.map((branches, place) =>
      responseCard(branches, { asked: asText(first.prompt), best: 0, worst: 0, reward: this.reward, label: single ? when(step) : "", before: i ? there[i - 1].samples[place] : null })));
    const byStep = there.flatMap(({ step }, i) => [el("h2", {}, when(step)), el("div", { class: "responses" }, cards[i])]);
    detail.replaceChildren(promptBox(first, ""), ...(single ? [el("div", { class: "responses" }, cards)] : byStep));
  },
  async update() {
    const prompts = await ask("prompts", { run: this.run });
    if (prompts.reduce((sum, prompt) => sum + prompt.steps.length, 0) !== this.known) await this.draw(this.panel);
  },
  key(key) {
    if (key === "j" || key === "ArrowDown") this.pick?.move(1);
    else if (key === "k" || key === "ArrowUp") this.pick?.move(-1);
    else if (key === "n" || key === "p") moveTurn(key === "n" ? 1 : -1);
    else return false;
    return true;
  },
};

/** Returns the range of a text that differs from another one: all but their common beginning and end. */
function differing(before, after) {
  if (before === after) return [];
  let start = 0, end = 0;
  while (start < Math.min(before.length, after.length) && before[start] === after[start]) start++;
  while (end < Math.min(before.length, after.length) - start && before[before.length - 1 - end] === after[after.length - 1 - end]) end++;
  return after.length - end > start ? [[start, after.length - end]] : [];
}
