// The panels beside the mesh: pure functions from an answer to what is shown.

const $ = id => document.getElementById(id);
const count = n => n.toLocaleString("en");

function element(name, text = "", kind = "") {
  const node = document.createElement(name);
  if (text !== "") node.textContent = text;
  if (kind) node.className = kind;
  return node;
}

function big(node, text) {
  const [number, ...unit] = text.split(" ");
  node.replaceChildren(number);
  if (unit.length) node.append(element("small", unit.join(" ")));
}

export function showAnswer(answer, before) {
  const what = answer.collective[0].toUpperCase() + answer.collective.slice(1);
  $("what").textContent = `${what} of ${answer.payload} per chip, predicted`;
  big($("time"), answer.time);
  big($("ratio"), answer.ratio.toFixed(answer.ratio < 10 ? 3 : 1) + " ×");
  $("bound").textContent = ` of ${answer.bound}`;
  $("delta").textContent = before && before.seconds !== answer.seconds ? change(answer.seconds / before.seconds - 1) + " by the last change" : "lock-step";
  const parts = answer.gap.filter(({seconds}) => seconds > 0), total = parts.reduce((sum, {seconds}) => sum + seconds, 0);
  const percent = seconds => (100 * seconds / total).toFixed(0) + " %";
  $("gap").replaceChildren();
  $("gap-keys").replaceChildren();
  for (const [i, {part, seconds}] of answer.gap.entries()) {
    if (!(seconds > 0)) continue;
    const bar = element("i", "", "g" + i), key = element("li");
    bar.style.flex = `${seconds / total} 0 0`;
    $("gap").append(bar);
    key.append(element("i", "", "g" + i), `${part} ${percent(seconds)}`);
    $("gap-keys").append(key);
  }
  $("gap").setAttribute("aria-label", "Where the time goes: " + parts.map(({part, seconds}) => `${part} ${percent(seconds)}`).join(", "));
  const proof = answer.proof.replace(/^proven /, ""); // the rest of the sentence is the verifier's own
  $("proof").replaceChildren(element("b", "✓ Proven"), ` ${proof}`);
  notice("");
  const facts = {
    planner: answer.planner,
    "live chips": `${count(answer.chips)} of ${count(answer.size)}`,
    steps: count(answer.steps),
    chunks: count(answer.chunks),
    transfers: count(answer.transfers),
    "busiest link": `${answer.busiest.toFixed(3)} of the payload`,
    "least time with latency": answer.least,
  };
  $("plan").replaceChildren(...Object.entries(facts).flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
  $("why").textContent = `The bound${answer.bound_is_exact ? "" : " is at least this; it"} counts bandwidth alone: ${answer.bound_why}.`;
  $("mesh-name").textContent = answer.mesh;
  $("command").textContent = answer.command;
}

const change = share => (share > 0 ? "+" : "−") + (Math.abs(share) < 10 ? (100 * Math.abs(share)).toFixed(1) + " %" : Math.round(Math.abs(share) + 1) + " ×");

export function showNoPlan(message) {
  for (const name of ["time", "ratio"]) $(name).textContent = "–";
  for (const name of ["bound", "proof", "why", "command", "mesh-name"]) $(name).textContent = "";
  $("delta").textContent = "no plan";
  for (const name of ["gap", "gap-keys", "plan"]) $(name).replaceChildren();
  notice(message);
}

export function notice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
  $("offers").replaceChildren();
}

export function offer(text, chosen) {
  const button = element("button", text);
  button.type = "button";
  button.addEventListener("click", chosen);
  $("offers").append(button);
}

// One row per alternative, as it comes in; the plan that is shown is marked.
export class Alternatives {
  constructor(answer) {
    this.answer = answer;
    this.rows = [];
    this.body = $("alternatives").tBodies[0];
  }

  add(row) {
    this.rows.push(row);
    this.show();
  }

  show() {
    const slowest = Math.max(this.answer.seconds ?? 0, ...this.rows.map(row => row.seconds ?? 0));
    const able = this.rows.filter(row => !row.unsupported_reason).sort((a, b) => a.seconds - b.seconds), not = this.rows.filter(row => row.unsupported_reason);
    this.body.replaceChildren(...[...able, ...not].map(row => this.#row(row, slowest)));
  }

  #row(row, slowest) {
    const node = element("tr", "", row.unsupported_reason ? "not" : row.name === this.answer.planner ? "own" : "");
    const name = element("td", row.name);
    node.append(name);
    if (row.unsupported_reason) {
      name.colSpan = 3;
      name.append(element("span", row.unsupported_reason, "soft"));
      return node;
    }
    if (row.detail) name.append(element("span", row.detail, "soft"));
    const meter = element("span", "", "meter"), fill = element("i");
    fill.style.width = `${100 * row.seconds / slowest}%`;
    meter.append(fill);
    name.append(meter);
    node.append(element("td", row.time, "number"), element("td", this.answer.seconds ? (row.seconds / this.answer.seconds).toFixed(2) : "–", "number"));
    return node;
  }
}

export function showLegend(view, phases = []) {
  const box = $("legend");
  box.replaceChildren();
  if (view === "load") {
    const scale = element("span", "", "scale");
    scale.append("load of a link: none ");
    for (let i = 0; i < 7; i++) scale.append(element("i", "", "b" + i));
    scale.append(" 1.6 × what the bound requires");
    box.append(scale);
  }
  for (const {name, colour, does} of phases) {
    const key = element("span"), swatch = element("i");
    swatch.style.cssText = `display:inline-block;width:20px;height:3px;margin:0 6px 3px 0;background:${colour}`;
    key.append(swatch, `${name} (${does})`);
    box.append(key);
  }
}
