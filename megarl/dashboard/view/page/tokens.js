// A response token by token: a value as the colour of each, and all its values where the pointer or the keys are.

const difference = (one, other) => (tokens) => tokens[one].map((value, i) => value - tokens[other][i]);

/** By name: what is shown, of which columns; `around` is the middle of its colours, else 0 is their beginning. */
const TONES = {
  advantages: { title: "advantage", of: ["advantages"], around: 0 },
  rollout: { title: "log-probability, engine", unit: "nats", of: ["rollout_logprobs"] },
  old: { title: "log-probability, actor", unit: "nats", of: ["old_logprobs"] },
  ref: { title: "log-probability, reference", unit: "nats", of: ["ref_logprobs"] },
  gap: { title: "difference, actor − engine", unit: "nats", of: ["old_logprobs", "rollout_logprobs"], values: difference("old_logprobs", "rollout_logprobs"), around: 0 },
  kl: { title: "actor − reference (KL)", unit: "nats", of: ["old_logprobs", "ref_logprobs"], values: difference("old_logprobs", "ref_logprobs"), around: 0 },
  ratio: { title: "ratio, actor to engine", of: ["old_logprobs", "rollout_logprobs"], values: (tokens) => difference("old_logprobs", "rollout_logprobs")(tokens).map(Math.exp), around: 1 },
  update: { title: "ratio in the update", of: ["ratio"], around: 1 },
  clipped: { title: "clipped in the update", of: ["clipped"] },
  values: { title: "value, critic", of: ["old_values"], around: 0 },
  weights: { title: "weight (correction)", of: ["weights"], around: 1 },
  mask: { title: "learned from (mask)", of: ["actor_mask"] },
};

/** Returns the names and entries of TONES that some samples have. */
function tokenTones(samples) {
  return Object.entries(TONES).filter(([, { of }]) => samples.some((sample) => sample.tokens && of.every((column) => column in sample.tokens)));
}

/** Returns a tone's value of each token, null of those that were not sampled. */
function toneValues(tone, tokens) {
  if (!tone.of.every((column) => column in tokens)) return [];
  const values = tone.values ? tone.values(tokens) : tokens[tone.of[0]];
  return tokens.loss_mask ? values.map((value, i) => (tokens.loss_mask[i] ? value : null)) : values;
}

/** Whether a token was given, or is not learned from. */
const isMasked = (tokens, i) => tokens.actor_mask?.[i] === 0 || tokens.loss_mask?.[i] === 0;

/** Returns how to draw responses in the colours of a tone, and the legend; the scale is that of all samples. */
function tokenColoring(samples, name) {
  const tone = TONES[name], middle = tone.around ?? 0;
  const sizes = samples.flatMap((sample) => (sample.tokens ? toneValues(tone, sample.tokens) : [])).filter((value) => value !== null).map((value) => Math.abs(value - middle)).sort((a, b) => a - b);
  const most = sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes[sizes.length - 1] || 1;
  const back = (value) => {
    const part = Math.round(62 * Math.min(1, Math.abs(value - middle) / most));
    return `color-mix(in srgb, var(--${tone.around === undefined ? "accent" : value > middle ? "good" : "bad"}) ${part}%, transparent)`;
  };
  const piece = (value) => el("span", { class: "token", style: { background: back(value) } }, number(value));
  const ends = tone.around === undefined ? (name === "mask" || name === "clipped" ? [0, 1] : [0, -most]) : [middle - most, middle, middle + most];
  const tip = el("div", { class: "tip", role: "status", hidden: true });
  return {
    legend: el("p", { class: "keys" }, `${tone.title}${tone.unit ? `, ${tone.unit}` : ""}: `, ends.map((value) => [piece(value), " "]), samples.some(({ response, tokens }) => tokens && (tokens.text || response).some((_, i) => isMasked(tokens, i))) ? [el("span", { class: "token masked" }, "not learned from"), " "] : "", "Point at a token for all its values, or choose a response and use ← and →.", tip),
    draw(sample) {
      const { tokens } = sample, values = toneValues(tone, tokens), texts = tokens.text || sample.response.map(String), all = tokenTones([sample]).map(([, own]) => [own, toneValues(own, tokens)]);
      const nodes = texts.map((text, i) => el("span", { class: `token${isMasked(tokens, i) ? " masked" : ""}`, "data-at": i, style: values.length && values[i] !== null ? { background: back(values[i]) } : {} }, shown(text || "∅"), tokens.text ? "" : " "));
      let at = -1;
      const leave = () => { nodes[at]?.classList.remove("at"); tip.hidden = true; };
      const point = (to) => {
        leave();
        at = Math.max(0, Math.min(nodes.length - 1, to));
        nodes[at]?.classList.add("at");
        tip.replaceChildren(el("b", {}, `token ${at + 1} `), el("span", { class: "mono" }, "“", shown(String(texts[at])), "”"), el("table", {}, all.map(([own, of]) => el("tr", {}, el("td", {}, own.title), el("td", { class: "number" }, of[at] === null ? "none" : number(Number(of[at].toPrecision(4))))))));
        tip.hidden = false;
        const box = nodes[at].getBoundingClientRect();
        tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
        tip.style.top = `${box.bottom + tip.offsetHeight + 6 < innerHeight ? box.bottom + 6 : box.top - tip.offsetHeight - 6}px`;
      };
      const [tag, classes, content] = sample.turns ? ["div", "tokens", turnNodes(sample, (turn, _, first) => nodes.slice(first, first + turn.tokens))] : ["pre", "text tokens", nodes];
      return el(tag, { class: classes, tabindex: 0, "aria-label": "Response, token by token", onpointerleave: leave, onblur: leave, onpointerover: (event) => { const token = event.target.closest("[data-at]"); if (token) point(Number(token.dataset.at)); },
        onkeydown: (event) => {
          const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
          if (!by) return;
          point(at + by);
          event.stopPropagation();
          event.preventDefault();
        } }, content);
    },
  };
}
