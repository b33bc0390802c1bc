import { readFileSync } from "node:fs";
import { JSDOM } from "jsdom";

globalThis.window = new JSDOM("").window; // labels are sanitized in a DOM
globalThis.document = window.document;
const { default: mermaid } = await import("mermaid");
for (const text of JSON.parse(readFileSync(0, "utf8"))) {
  try { const { diagramType } = await mermaid.parse(text); console.log(JSON.stringify({ diagramType })); }
  catch (error) { console.log(JSON.stringify({ error: error.message })); }
}
