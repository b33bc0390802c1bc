// The settings of the runs, and what differs between them.

const settingsView = {
  name: "Settings",
  all: false, text: "",
  async draw(panel) {
    const runs = await Promise.all(state.runs.map((_, run) => ask("settings", { run })));
    const all = el("input", { type: "checkbox", checked: this.all, onchange: () => { this.all = all.checked; fill(); } }), body = el("div", { class: "panel scroll" });
    const search = el("input", { type: "search", class: "grow", placeholder: "Search settings", "aria-label": "Search settings", value: this.text, oninput: () => { this.text = search.value; fill(); } });
    const fill = () => body.replaceChildren(this.table(runs));
    panel.replaceChildren(el("div", { class: "toolbar" }, search, runs.length > 1 ? el("label", {}, all, "all settings") : null), body);
    fill();
  },
  table(runs) {
    const fields = [...new Set(runs.flatMap((run) => Object.keys(run)))], words = this.text.toLowerCase();
    const rows = fields.map((field) => {
      const values = runs.map((run) => plain(run[field]));
      return { field, values, differs: field !== "run.dir" && new Set(values).size > 1 };
    }).filter(({ field, differs, values }) => (this.all || differs || runs.length === 1) && (!words || `${field} ${values.join(" ")}`.toLowerCase().includes(words)));
    if (!rows.length) return el("div", { class: "empty" }, words ? "No setting has this text." : "Nothing differs.");
    return el("table", {}, el("tr", {}, el("th", {}, "Setting"), state.runs.map((run) => el("th", {}, run.name))),
      rows.map(({ field, values, differs }) => el("tr", {}, el("td", { class: "mono field" }, field), values.map((value) => el("td", { class: "mono", style: differs && this.all ? { fontWeight: 650 } : {} }, shown(value))))));
  },
};

const plain = (value) => (value === undefined ? "–" : value === null ? "null" : typeof value === "string" ? value : JSON.stringify(value));
