// The player: the transfers of a plan, step by step, on a canvas over the mesh view. Its data is that of the
// step-by-step page of `meshmend draw`: one line per arrow, and for every step the arrows that change.

export class Player {
  constructor({canvas, svg, play, back, forward, slider, now, view}) {
    Object.assign(this, {canvas, svg, playButton: play, slider, now, view, timer: null, data: null});
    play.addEventListener("click", () => this.timer === null ? this.play() : this.pause());
    back.addEventListener("click", () => this.jump(this.at - 1));
    forward.addEventListener("click", () => this.jump(this.at + 1));
    slider.addEventListener("input", () => this.jump(Number(slider.value)));
  }

  load(data) {
    this.pause();
    this.data = data;
    this.frames = data.last - data.first + 1;
    this.#decode();
    this.on = new Uint8Array(data.src.length);
    this.at = 0;
    this.#flip(0);
    this.slider.max = this.frames - 1;
    this.resize();
  }

  clear() {
    this.pause();
    this.data = null;
    this.now.textContent = "";
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
  }

  play() {
    if (!this.data) return;
    if (this.at === this.frames - 1) this.go(0);
    const pace = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1200 : this.frames > 200 ? 60 : 160;
    this.timer = setInterval(() => this.at === this.frames - 1 ? this.pause() : this.go(this.at + 1), pace);
    this.playButton.textContent = "Pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.playButton.textContent = "Play";
  }

  jump(to) { this.pause(); this.go(to); }

  go(to) {
    if (!this.data) return;
    to = Math.max(0, Math.min(this.frames - 1, to));
    while (this.at < to) this.#flip(++this.at);
    while (this.at > to) this.#flip(this.at--);
    this.paint();
  }

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
    const pen = this.canvas.getContext("2d"), isDark = document.documentElement.dataset.theme === "dark";
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    let total = 0;
    for (let i = 0; i < this.on.length; i++) if (this.on[i]) { this.#arrow(pen, i, isDark); total++; }
    const {data, at} = this, cut = data.last + 1 < data.steps;
    this.now.textContent = `step ${(data.first + at + 1).toLocaleString("en")} of ${data.steps.toLocaleString("en")}, ${total.toLocaleString("en")} ${total === 1 ? "arrow" : "arrows"}`;
    this.now.title = cut ? `The first ${this.frames.toLocaleString("en")} steps are shown.` : "";
    this.slider.value = at;
    this.slider.setAttribute("aria-valuetext", `step ${data.first + at + 1}`);
  }

  #decode() {
    const text = atob(this.data.changes), changed = [];
    this.starts = new Uint32Array(this.frames + 1);
    let place = 0;
    const next = () => { let value = 0, shift = 0, byte; do { byte = text.charCodeAt(place++); value |= (byte & 127) << shift; shift += 7; } while (byte & 128); return value; };
    for (let t = 0; t < this.frames; t++) {
      let arrow = 0;
      for (let n = next(); n > 0; n--) changed.push(arrow += next());
      this.starts[t + 1] = changed.length;
    }
    this.changed = Uint32Array.from(changed);
  }

  #flip(t) { for (let i = this.starts[t]; i < this.starts[t + 1]; i++) this.on[this.changed[i]] ^= 1; }

  #arrow(pen, number, isDark) {
    const {data, cell} = this, look = data.phases[data.phase[number]], pieces = data.lines[data.line[number]];
    const X = x => this.left + x * cell, Y = y => this.top + y * cell;
    const colour = isDark ? {"#1A1A1A": "#ECEFF2", "#0072B2": "#56B4E9"}[look.colour] ?? look.colour : look.colour;
    const width = Math.max(1.2, Math.min(4, cell / 18)), length = Math.max(4, Math.min(16, cell / 5));
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.setLineDash(look.dash.map(n => n * width));
    for (const points of pieces) {
      pen.beginPath();
      for (let i = 0; i < points.length; i += 2) pen[i ? "lineTo" : "moveTo"](X(points[i]), Y(points[i + 1]));
      pen.stroke();
    }
    const end = pieces.at(-1), n = end.length, tx = X(end[n - 2]), ty = Y(end[n - 1]);
    const angle = Math.atan2(ty - Y(end[n - 3]), tx - X(end[n - 4]));
    pen.setLineDash([]);
    pen.lineWidth = 0.6 * width;
    pen.fillStyle = look.open ? (isDark ? "#161C23" : "#fff") : colour;
    pen.beginPath();
    pen.moveTo(tx, ty);
    for (const side of [0.42, -0.42]) pen.lineTo(tx - length * Math.cos(angle + side), ty - length * Math.sin(angle + side));
    pen.closePath();
    pen.fill();
    pen.stroke();
  }
}
