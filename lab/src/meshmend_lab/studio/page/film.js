// The film: the steps of a plan on a canvas over the mesh view.

import {Player} from "./player.js";

export class Film extends Player {
  constructor({canvas, svg, now, view, ...controls}) {
    super(controls);
    Object.assign(this, {canvas, svg, now, view});
  }

  load(data) {
    super.load(data);
    this.resize();
  }

  clear() {
    this.pause();
    this.data = null;
    this.now.textContent = "";
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
  }

  pace() { return matchMedia("(prefers-reduced-motion: reduce)").matches ? 1200 : this.frames > 200 ? 60 : 160; }

  resize() {
    if (!this.data || this.canvas.hidden) return;
    const box = this.svg.getBoundingClientRect(), around = this.canvas.parentElement.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    const {x, y, width, height} = this.view.view;
    const cell = Math.min(box.width / width, box.height / height);
    Object.assign(this.canvas.style, {left: box.left - around.left + "px", top: box.top - around.top + "px", width: box.width + "px", height: box.height + "px"});
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    this.cell = cell * ratio;
    this.left = (this.canvas.width - width * this.cell) / 2 - x * this.cell;
    this.top = (this.canvas.height - height * this.cell) / 2 - y * this.cell;
    this.paint();
  }

  paint() {
    const {data, at, cell} = this, pen = this.canvas.getContext("2d"), isDark = document.documentElement.dataset.theme === "dark";
    const look = {
      x: x => this.left + x * cell,
      y: y => this.top + y * cell,
      shade: colour => isDark ? {"#1A1A1A": "#ECEFF2", "#0072B2": "#56B4E9"}[colour] ?? colour : colour,
      hollow: isDark ? "#161C23" : "#fff",
      width: Math.max(1.2, Math.min(4, cell / 18)),
      length: Math.max(4, Math.min(16, cell / 5)),
    };
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    let total = 0;
    this.on.forEach((shown, arrow) => { if (shown) { this.drawArrow(pen, arrow, look); total++; } });
    this.now.textContent = `step ${(data.first + at + 1).toLocaleString("en")} of ${data.steps.toLocaleString("en")}, ${total.toLocaleString("en")} ${total === 1 ? "arrow" : "arrows"}`;
    this.now.title = data.last + 1 < data.steps ? `The first ${this.frames.toLocaleString("en")} steps are shown.` : "";
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", `step ${data.first + at + 1}`);
  }
}
