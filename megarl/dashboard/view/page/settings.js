// The settings of the runs, and what differs from the defaults, from a recipe or between runs.

const settingsView = {
  name: "Settings",
  against: null, all: false, text: "",
  async draw(panel) {
    const [recipes, ...runs] = await Promise.all([ask("recipes", { run: 0 }), ...state.runs.map((_, run) => ask("settings", { run }))]);
    if (this.against === null) this.against = runs.length > 1 ? "runs" : "defaults";
    const options = [...(runs.length > 1 ? [["runs", "Between the runs"]] : []), ["defaults", "From the defaults"], ...Object.keys(recipes).map((name) => [`recipe ${name}`, `From the recipe ${name}`])];
    const choice = el("select", { "aria-label": "Show what differs", onchange: () => { this.against = choice.value; this.draw(panel); } }, options.map(([value, text]) => el("option", { value, selected: value === this.against }, text)));
    const all = el("input", { type: "checkbox", checked: this.all, onchange: () => { this.all = all.checked; fill(); } }), body = el("div", { class: "panel scroll" });
    const search = el("input", { type: "search", class: "grow", placeholder: "Search settings", "aria-label": "Search settings", value: this.text, oninput: () => { this.text = search.value; fill(); } });
    const fill = () => body.replaceChildren(this.table(runs, recipes));
    panel.replaceChildren(el("div", { class: "toolbar" }, el("label", {}, "What differs", choice), search, el("label", {}, all, "all settings")), body);
    fill();
  },
  table(runs, recipes) {
    const base = this.base(runs, recipes), fields = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))], words = this.text.toLowerCase();
    const rows = fields.map((field) => {
      const values = runs.map((run) => run.settings[field]), differs = base.differs(field, values);
      return { field, values, differs, from: base.value(field) };
    }).filter(({ field, differs, values }) => (this.all || differs) && (!words || `${field} ${values.map(plain).join(" ")}`.toLowerCase().includes(words)));
    const unknown = this.against === "defaults" && runs.some(({ changed }) => !changed);
    if (!rows.length) return el("div", { class: "empty" }, words ? "No setting has this text." : unknown ? "This version of MegaRL does not accept the configuration, and does not know its defaults." : "Nothing differs.");
    return el("table", {}, el("tr", {}, el("th", {}, "Setting"), state.runs.map((run) => el("th", {}, run.name)), base.title ? el("th", {}, base.title) : null),
      rows.map(({ field, values, differs, from }) => el("tr", {}, el("td", { class: "mono field" }, field), values.map((value) => el("td", { class: "mono", style: differs && this.all ? { fontWeight: 650 } : {} }, shown(plain(value)))), base.title ? el("td", { class: "mono muted" }, from === undefined ? "" : shown(plain(from))) : null)));
  },
  /** Returns what the settings are compared with. */
  base(runs, recipes) {
    if (this.against === "runs") return { title: "", value: () => undefined, differs: (field, values) => field !== "run.dir" && new Set(values.map(plain)).size > 1 };
    if (this.against === "defaults") {
      const changed = runs.map((run) => run.changed || {});
      return { title: "Default", value: (field) => { const found = changed.find((fields) => prefixed(fields, field) !== undefined); return found && (prefixed(found, field) === null ? undefined : found[field]); }, differs: (field) => changed.some((fields) => prefixed(fields, field) !== undefined) };
    }
    const recipe = recipes[this.against.slice("recipe ".length)], of = (field) => recipe[field] ?? (field.endsWith(".name") ? recipe[field.slice(0, -".name".length)] : undefined);
    return { title: this.against, value: of, differs: (field, values) => of(field) !== undefined && values.some((value) => plain(value) !== plain(of(field))) };
  },
};

const plain = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "string" ? value : JSON.stringify(value));

/** Returns a field's default; a default of a section is that of its fields. */
function prefixed(fields, field) {
  for (let path = field; path; path = path.slice(0, Math.max(0, path.lastIndexOf(".")))) if (path in fields) return path === field ? fields[path] : null;
  return undefined;
}
