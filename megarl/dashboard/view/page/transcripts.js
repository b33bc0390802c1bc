// Conversations: the turns of the model apart from what was given between them, and the branches of each together.

/** Returns samples as lists of branches; a sample without branches is a list of one. */
function withBranches(samples) {
  const found = [];
  for (const sample of samples) {
    if (found.length && /#\d+$/.test(sample.sample_id)) found[found.length - 1].push(sample);
    else found.push([sample]);
  }
  return found;
}

const counted = (count, name) => `${count} ${name}${count === 1 ? "" : "s"}`;

/** Returns the turns of a branch; `content` returns the nodes of a turn, by its place and the place of its first token. */
function turnNodes({ kind, turns }, content) {
  let start = 0;
  return turns.map((turn, place) => {
    const by = turn.sampled ? "model" : "environment", first = start;
    start += turn.tokens;
    return el("section", { class: `turn ${by}`, tabindex: -1, "aria-label": by },
      el("div", { class: "by number" }, el("b", {}, by), el("span", {}, counted(turn.tokens, "token")), turn.sampled ? el("span", { class: turn.reward > 0 ? "good" : turn.reward < 0 ? "bad" : "" }, `reward ${score(turn.reward)}`) : kind === "train" ? el("span", {}, "not learned from") : null),
      el("pre", { class: "text" }, content(turn, place, first)));
  });
}

/** Returns the branches of a conversation, one below the other; `asked` is the prompt that is shown elsewhere. */
function transcript(branches, { asked, text, before, coloring }) {
  return branches.flatMap((branch, number) => {
    const prompt = asText(branch.prompt), hits = found(prompt, text || "");
    const earlier = before ? before[number]?.turns || [] : null;
    const marks = (turn, place) => (earlier ? differing(asText(earlier[place]?.text ?? ""), asText(turn.text)) : found(asText(turn.text), text || ""));
    return [
      number ? el("p", { class: "muted" }, `Branch ${number + 1}: it begins with the turns before, as the chat template writes them now.`) : null,
      prompt === asked ? null : el("details", { open: hits.length > 0 }, el("summary", {}, `prompt, ${counted(branch.prompt_tokens, "token")}`), el("pre", { class: "text" }, shown(prompt, hits))),
      coloring && branch.tokens ? coloring.draw(branch) : turnNodes(branch, (turn, place) => shown(asText(turn.text), marks(turn, place))),
    ];
  });
}

/** Returns how a sample ended: a conversation, or a response of one turn. */
function howEnded({ finished, outcome }) {
  if (!outcome) return el("span", { class: finished ? "" : "warn" }, finished ? "ended by the model" : "cut off at the length limit");
  if (outcome.failure !== null) return el("span", { class: "bad" }, "failed");
  return el("span", { class: outcome.truncated ? "warn" : "" }, outcome.truncated ? `ended by ${outcome.limit && outcome.limit !== "environment" ? outcome.limit : "a limit"}` : "ended by the environment");
}

/** Moves the focus to the next or the last turn. */
function moveTurn(by) {
  const turns = [...panel.querySelectorAll(".turn")], at = turns.indexOf(document.activeElement.closest(".turn"));
  turns[at < 0 && by < 0 ? turns.length - 1 : Math.max(0, Math.min(turns.length - 1, at + by))]?.focus();
}
