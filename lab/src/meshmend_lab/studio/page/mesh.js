// The mesh view: a component that draws a machine from JSON and reports what was clicked. It knows no server and no
// plan: whoever has a layout, failures and loads can feed it.

const SVG = "http://www.w3.org/2000/svg";
const CHIP = 0.3, ASIDE = 0.075, MARGIN = 0.55, SMALLEST_LABEL = 30;
export const LEVELS = [0.25, 0.5, 0.75, 0.95, 1.2, 1.6];

export function make(name, attributes = {}, parent = null) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.append(node);
  return node;
}

// A level of the scale: what a link carries over what the bound requires of the average narrow place.
export const level = ratio => LEVELS.filter(limit => ratio >= limit).length;

export class MeshView {
  constructor(svg, {onChip, onCable, onBox, onPoint}) {
    Object.assign(this, {svg, onChip, onCable, onBox, onPoint, chips: new Map(), cables: new Map(), places: new Map(), at: null});
    this.describe = {chip: name => name, cable: name => name};
    svg.addEventListener("click", event => this.#click(event));
    svg.addEventListener("keydown", event => this.#key(event));
    svg.addEventListener("focusin", event => this.#focus(event));
    svg.addEventListener("pointerdown", event => this.#down(event));
    svg.addEventListener("pointermove", event => this.#move(event));
    svg.addEventListener("pointerup", event => this.#up(event));
    svg.addEventListener("pointercancel", () => this.#drop());
    svg.addEventListener("pointerleave", () => this.#point());
    new ResizeObserver(() => this.#resized()).observe(svg);
  }

  // Draw a machine: {shape, wrap, box: [left, right, top, bottom], chips: [{name, at, x, y}], cables: [{name, lines}]}.
  layout(facts) {
    const [left, right, top, bottom] = facts.box, isPlane = facts.shape.length <= 2;
    const edge = isPlane ? MARGIN : 0.1;
    this.facts = facts;
    this.view = {x: left - edge, y: top - edge, width: right - left + edge + 0.1, height: bottom - top + edge + 0.1};
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", [this.view.x, this.view.y, this.view.width, this.view.height].join(" "));
    this.chips.clear();
    this.cables.clear();
    this.places.clear();
    if (isPlane) this.#numbers(facts, left, top);
    const cables = make("g", {}, this.svg), chips = make("g", {}, this.svg);
    for (const cable of facts.cables) this.cables.set(cable.name, this.#cable(cable, cables));
    for (const chip of facts.chips) this.chips.set(chip.name, this.#chip(chip, chips));
    this.at = facts.chips[0].name;
    this.chips.get(this.at).setAttribute("tabindex", "0");
    this.#resized();
  }

  // Show what has failed: `failed` has names of chips, `cables` the rate of each cable that is not whole.
  failures(failed, cables) {
    for (const [name, node] of this.chips) {
      const isFailed = failed.has(name);
      node.classList.toggle("failed", isFailed);
      node.setAttribute("aria-pressed", String(isFailed));
      node.setAttribute("aria-label", `chip ${name}, ${isFailed ? "failed" : "live"}`);
    }
    for (const [name, node] of this.cables) {
      const rate = cables.get(name), gone = name.split("-").some(chip => failed.has(chip));
      node.classList.toggle("gone", gone);
      node.classList.toggle("dead", !gone && rate === "0");
      node.classList.toggle("slow", !gone && rate !== undefined && rate !== "0");
    }
    this.#point(this.pointed);
  }

  // Show what the links carry: for each cable how long its two links are busy, in units of which `bound` is the least.
  loads(links, bound) {
    for (const [name, node] of this.cables) {
      const busy = links?.[name] ?? [0, 0];
      for (const [i, path] of node.querySelectorAll(".load").entries()) {
        const ratio = bound ? busy[i % 2] / bound : 0;
        path.setAttribute("class", `load l${level(ratio)}`);
        path.style.strokeWidth = (links ? 0.035 + 0.055 * Math.min(1.6, ratio) : 0).toFixed(3);
      }
    }
    this.links = links;
    this.#point(this.pointed);
    this.svg.classList.remove("stale");
  }

  stale() { this.svg.classList.add("stale"); }

  focus(name) {
    const node = this.chips.get(name);
    if (!node) return;
    this.chips.get(this.at)?.setAttribute("tabindex", "-1");
    this.at = name;
    node.setAttribute("tabindex", "0");
    node.focus();
  }

  // A picture of what is shown, for a file of its own: the styles that CSS gives are written into it.
  picture(title) {
    const copy = this.svg.cloneNode(true), live = [this.svg, ...this.svg.querySelectorAll("*")];
    for (const [i, node] of [copy, ...copy.querySelectorAll("*")].entries()) {
      const style = getComputedStyle(live[i]);
      if (style.display === "none") node.setAttribute("data-remove", "");
      for (const name of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "opacity", "font-size", "text-anchor", "dominant-baseline"]) {
        if (i) node.setAttribute(name, style.getPropertyValue(name));
      }
      for (const name of ["class", "style", "role", "tabindex", "aria-label", "aria-pressed", "id", "data-name"]) node.removeAttribute(name);
    }
    copy.querySelectorAll("[data-remove]").forEach(node => node.remove());
    const {x, y, width, height} = this.view;
    copy.setAttribute("xmlns", SVG);
    copy.setAttribute("width", Math.round(width * 48));
    copy.setAttribute("height", Math.round(height * 48));
    copy.setAttribute("font-family", "system-ui, sans-serif");
    const ground = make("rect", {x, y, width, height, fill: getComputedStyle(document.documentElement).getPropertyValue("--panel")});
    const heading = make("title");
    heading.textContent = title;
    copy.prepend(heading, ground);
    return new XMLSerializer().serializeToString(copy);
  }

  #numbers(facts, left, top) {
    const [rows, columns] = facts.shape.length === 2 ? facts.shape : [1, facts.shape[0]];
    const numbers = make("g", {"aria-hidden": "true"}, this.svg);
    const put = (text, x, y) => { make("text", {x, y, class: "axis"}, numbers).textContent = text; };
    for (let column = 0; column < columns; column++) put(column, column, top - 0.18);
    for (let row = 0; row < rows && facts.shape.length === 2; row++) put(row, left - 0.2, row);
  }

  #chip({name, x, y}, parent) {
    this.places.set(name, [x, y]);
    const node = make("g", {class: "chip", role: "button", tabindex: "-1", "data-name": name, transform: `translate(${x} ${y})`}, parent);
    make("rect", {x: -CHIP, y: -CHIP, width: 2 * CHIP, height: 2 * CHIP, rx: 0.05}, node);
    make("text", {}, node).textContent = name;
    make("path", {class: "cross", d: "M-.14 -.14L.14 .14M-.14 .14L.14 -.14"}, node);
    return node;
  }

  #cable({name, lines}, parent) {
    const node = make("g", {class: "cable", "data-name": name}, parent);
    const path = (points, kind) => make("path", {class: kind, d: "M" + points.map(p => p.map(v => v.toFixed(3)).join(" ")).join("L")}, node);
    const pieces = lines.map(flat => Array.from({length: flat.length / 2}, (_, i) => [flat[2 * i], flat[2 * i + 1]]));
    for (const points of pieces) path(points, "base");
    for (const points of pieces) for (const side of [1, -1]) path(moved(points, side * ASIDE), "load l0");
    for (const points of pieces) path(points, "hit");
    for (const points of pieces) {
      const [x, y] = middle(points), r = 0.1;
      make("path", {class: "mark", d: `M${x - r} ${y - r}l${2 * r} ${2 * r}M${x - r} ${y + r}l${2 * r} ${-2 * r}`}, node);
    }
    return node;
  }

  #resized() {
    if (!this.view) return;
    const box = this.svg.getBoundingClientRect();
    const cell = Math.min(box.width / this.view.width, box.height / this.view.height);
    this.svg.classList.toggle("small", cell < SMALLEST_LABEL || this.facts.shape.length > 2 && cell < 2 * SMALLEST_LABEL);
    this.svg.style.setProperty("--axis", (Math.min(0.3, 12 / (cell || 1))).toFixed(3) + "px"); // 12 pixels at most
    this.onResize?.();
  }

  #click(event) {
    if (this.dragged) { this.dragged = false; return; }
    const chip = event.target.closest(".chip"), cable = event.target.closest(".cable");
    if (chip) { this.focus(chip.dataset.name); this.onChip(chip.dataset.name); }
    else if (cable) this.onCable(cable.dataset.name);
  }

  #focus(event) {
    const chip = event.target.closest(".chip");
    if (chip) this.#point(chip);
  }

  // Say what a chip or a cable is; also after it has changed under a pointer that rests.
  #point(node = null) {
    const name = node?.dataset.name;
    this.pointed = this.chips.has(name) || this.cables.has(name) ? node : null;
    this.onPoint(!this.pointed ? "" : this.chips.has(name) ? this.describe.chip(name) : this.describe.cable(name));
  }

  #key(event) {
    const way = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[event.key];
    const chip = event.target.closest(".chip");
    if (!chip || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.onChip(chip.dataset.name); return; }
    if (!way) return;
    event.preventDefault();
    const there = this.#beside(chip.dataset.name, way);
    if (event.shiftKey) {
      const name = this.#between(chip.dataset.name, way);
      if (name) this.onCable(name);
    } else if (there) this.focus(there);
  }

  // The next chip that way, by where it is drawn; planes side by side are walked through.
  #beside(name, [dx, dy]) {
    const [x, y] = this.places.get(name);
    let best = null, least = Infinity;
    for (const [other, [ox, oy]] of this.places) {
      const ahead = (ox - x) * dx + (oy - y) * dy, aside = Math.abs((ox - x) * dy) + Math.abs((oy - y) * dx);
      if (ahead > 0 && aside < 0.5 && ahead < least) { least = ahead; best = other; }
    }
    return best;
  }

  // The cable that leaves a chip that way, also one that wraps.
  #between(name, [dx, dy]) {
    const [x, y] = this.places.get(name);
    for (const cable of this.facts.cables) {
      if (!cable.name.split("-").includes(name)) continue;
      for (const flat of cable.lines) {
        const n = flat.length, ends = [[flat[0], flat[1], flat[2], flat[3]], [flat[n - 2], flat[n - 1], flat[n - 4], flat[n - 3]]];
        for (const [ax, ay, bx, by] of ends) {
          if (Math.hypot(ax - x, ay - y) < 0.01 && ((bx - ax) * dx + (by - ay) * dy) > 0.7 * Math.hypot(bx - ax, by - ay)) return cable.name;
        }
      }
    }
    return null;
  }

  #place(event) {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
    return [point.x, point.y];
  }

  #down(event) {
    this.dragged = false;
    if (event.button === 0 && event.pointerType !== "touch") this.from = this.#place(event);
  }

  #move(event) {
    const chip = event.target.closest(".chip"), cable = event.target.closest(".cable");
    this.#point(chip ?? cable);
    if (!this.from) return;
    const [x, y] = this.#place(event), [fx, fy] = this.from;
    if (!this.rubber && Math.hypot(x - fx, y - fy) < 0.5) return;
    this.rubber ??= make("rect", {class: "rubber", rx: 0.1}, this.svg);
    this.svg.setPointerCapture(event.pointerId);
    const box = {x: Math.min(x, fx), y: Math.min(y, fy), width: Math.abs(x - fx), height: Math.abs(y - fy)};
    for (const [key, value] of Object.entries(box)) this.rubber.setAttribute(key, value);
    this.box = box;
  }

  #up() {
    const {box} = this, drawn = Boolean(this.rubber);
    this.#drop();
    if (!drawn) return;
    this.dragged = true; // the click that follows is the end of this
    const inside = [...this.places].filter(([, [x, y]]) => x > box.x - CHIP && x < box.x + box.width + CHIP && y > box.y - CHIP && y < box.y + box.height + CHIP);
    if (inside.length) this.onBox(inside.map(([name]) => name));
  }

  #drop() {
    this.rubber?.remove();
    this.rubber = this.from = null;
  }
}

function middle(points) {
  const [ax, ay] = points[Math.floor((points.length - 1) / 2)], [bx, by] = points[Math.ceil((points.length) / 2)] ?? points.at(-1);
  return [(ax + bx) / 2, (ay + by) / 2];
}

// A line beside another one, to the right of its direction, without what the chips at its ends cover.
function moved(points, by) {
  const [ax, ay] = points[0], [bx, by_] = points.at(-1), length = Math.hypot(bx - ax, by_ - ay) || 1;
  const nx = -(by_ - ay) / length * by, ny = (bx - ax) / length * by;
  return points.map(([x, y]) => [x + nx, y + ny]);
}
