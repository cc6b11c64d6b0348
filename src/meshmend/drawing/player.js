// The player: the transfers of a plan, step by step. The page of `meshmend draw` has it inlined, the studio imports it.
// Its data is one line per arrow, and for every step the arrows and the chips' levels that change, in LEB128.

function reader(coded) {
  const text = atob(coded);
  let place = 0;
  return () => { let value = 0, shift = 0, byte; do { byte = text.charCodeAt(place++); value |= (byte & 127) << shift; shift += 7; } while (byte & 128); return value; };
}

export class Player {
  // Whoever shows the steps replaces `paint`, `pace` (milliseconds per step) and `playing`, which is told of play and pause.
  constructor({play, back, forward, start, end, slider}) {
    Object.assign(this, {playButton: play, slider, timer: null, data: null, at: 0});
    play.addEventListener("click", () => this.toggle());
    back.addEventListener("click", () => this.jump(this.at - 1));
    forward.addEventListener("click", () => this.jump(this.at + 1));
    start?.addEventListener("click", () => this.jump(0));
    end?.addEventListener("click", () => this.jump(this.frames - 1));
    slider.addEventListener("input", () => this.jump(Number(slider.value)));
  }

  paint() {}
  playing() {}

  load(data) {
    this.pause();
    Object.assign(this, {data, at: 0, frames: data.last - data.first + 1, on: new Uint8Array(data.src.length), level: new Uint8Array(data.names.length)});
    const next = reader(data.changes), nextLevel = reader(data.filling);
    this.changes = [];
    for (let t = 0; t < this.frames; t++) {
      const arrows = [], chips = [];
      let arrow = 0, chip = 0;
      for (let n = next(); n > 0; n--) arrows.push(arrow += next());
      // A chip's number, and which bits of its level change: so a step back undoes what a step did.
      for (let n = nextLevel(); n > 0; n--) { const code = nextLevel(); chips.push(chip += code >> 5, code & 31); }
      this.changes.push([Uint32Array.from(arrows), Uint32Array.from(chips)]);
    }
    this.#flip(0);
    this.slider.max = this.frames - 1;
  }

  #flip(t) {
    const [arrows, chips] = this.changes[t];
    for (const arrow of arrows) this.on[arrow] ^= 1;
    for (let i = 0; i < chips.length; i += 2) this.level[chips[i]] ^= chips[i + 1];
  }

  toggle() { if (this.timer === null) this.play(); else this.pause(); }

  play() {
    if (!this.data) return;
    if (this.at === this.frames - 1) this.go(0);
    this.timer = setInterval(() => this.at === this.frames - 1 ? this.pause() : this.go(this.at + 1), this.pace());
    this.playButton.textContent = "Pause";
    this.playing(true);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    this.playButton.textContent = "Play";
    this.playing(false);
  }

  jump(to) { this.pause(); this.go(to); }

  go(to) {
    if (!this.data) return;
    to = Math.max(0, Math.min(this.frames - 1, to));
    while (this.at < to) this.#flip(++this.at);
    while (this.at > to) this.#flip(this.at--);
    this.slider.value = this.at;
    this.paint();
  }

  // Draws an arrow: x and y place a point, `shade` makes a phase's colour the theme's, `hollow` fills open heads.
  drawArrow(pen, number, {x, y, shade, hollow, width, length}) {
    const {data} = this, look = data.phases[data.phase[number]], pieces = data.lines[data.line[number]];
    pen.strokeStyle = shade(look.colour);
    pen.lineWidth = width;
    pen.setLineDash(look.dash.map(n => n * width));
    for (const points of pieces) {
      pen.beginPath();
      for (let i = 0; i < points.length; i += 2) pen[i ? "lineTo" : "moveTo"](x(points[i]), y(points[i + 1]));
      pen.stroke();
    }
    const end = pieces.at(-1), n = end.length, tx = x(end[n - 2]), ty = y(end[n - 1]);
    const angle = Math.atan2(ty - y(end[n - 3]), tx - x(end[n - 4]));
    pen.setLineDash([]);
    pen.lineWidth = 0.6 * width;
    pen.fillStyle = look.open ? hollow : shade(look.colour);
    pen.beginPath();
    pen.moveTo(tx, ty);
    for (const side of [0.42, -0.42]) pen.lineTo(tx - length * Math.cos(angle + side), ty - length * Math.sin(angle + side));
    pen.closePath();
    pen.fill();
    pen.stroke();
  }
}
